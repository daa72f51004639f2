"""ModelConfig: scheduling, batching and instance groups."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from gpu_engine import GpuLoader
from triton_requests import MODEL
from tritonclient.grpc import aio as triton_aio
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup, ModelQueuePolicy

from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.engines.worker_pool import WorkerResources
from maskrcnn_trt.serving.pipeline import served_model
from maskrcnn_trt.serving.server import detection_server


def configurations(bundle: Path, **settings: Any) -> list[Any]:
    """Return the configuration of the model under each of its names."""

    async def run() -> list[Any]:
        async with (
            detection_server(bundle, ServeConfig(port=0, **settings)) as address,
            triton_aio.InferenceServerClient(address) as client,
        ):
            names = (MODEL, f"{MODEL}-fp32")
            return [(await client.get_model_config(name)).config for name in names]

    return asyncio.run(run())


def test_configuration_describes_scheduling_and_instances(bundle: Path) -> None:
    settings = {"workers": 2, "timeout_s": 2.5, "queue_size": 7, "preferred_batch": (2, 4)}
    for config in configurations(bundle, **settings):
        batching, policy = config.dynamic_batching, config.dynamic_batching.default_queue_policy
        assert list(batching.preferred_batch_size) == [2, 4]
        assert (batching.priority_levels, batching.default_priority_level) == (3, 2)
        assert policy.timeout_action == ModelQueuePolicy.REJECT
        assert policy.default_timeout_microseconds == 2_500_000
        assert policy.allow_timeout_override
        assert policy.max_queue_size == config.max_batch_size == 7
        (group,) = config.instance_group
        assert (group.kind, group.count, list(group.gpus)) == (ModelInstanceGroup.KIND_CPU, 2, [])
        assert config.version_policy.latest.num_versions == 1


def test_instances_are_grouped_by_gpu(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = [WorkerResources({}, os.sched_getaffinity(0), gpu=gpu) for gpu in (0, 1, 0)]
    monkeypatch.setattr(served_model, "assign_resources", lambda _: resources)
    monkeypatch.setattr(served_model, "BundleLoader", GpuLoader)
    for config in configurations(bundle):
        groups = [(group.kind, group.count, list(group.gpus)) for group in config.instance_group]
        assert groups == [
            (ModelInstanceGroup.KIND_GPU, 2, [0]),
            (ModelInstanceGroup.KIND_GPU, 1, [1]),
        ]

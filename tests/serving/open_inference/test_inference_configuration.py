"""ModelConfig: scheduling, batching and instance groups."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_engines import ActionEngine
from in_process_server import served_in_thread
from triton_requests import MODEL
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup, ModelQueuePolicy

from maskrcnn_trt.serving.engines.worker_process import WorkerResources
from maskrcnn_trt.serving.pipeline import served_model


@pytest.fixture
def configurations(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that serves the bundle with engines that report a device.

    It returns the configuration of the model under each of its names.
    """

    def configurations(device: str, **settings: Any) -> list[Any]:
        engine = ActionEngine()
        engine.info = engine.info._replace(device=device)
        monkeypatch.setattr(served_model, "BundleLoader", lambda *_: engine)
        with (
            served_in_thread(bundle, **settings) as address,
            InferenceServerClient(address) as client,
        ):
            return [client.get_model_config(name).config for name in (MODEL, f"{MODEL}-fp32")]

    return configurations


def test_configuration_describes_scheduling_and_instances(
    configurations: Callable[..., list[Any]],
) -> None:
    settings = {"workers": 2, "timeout_s": 2.5, "queue_size": 7, "preferred_batch": (2, 4)}
    for config in configurations("cpu", **settings):
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


def test_instances_are_grouped_by_gpu(
    configurations: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = [WorkerResources({}, os.sched_getaffinity(0), gpu=gpu) for gpu in (0, 1, 0)]
    monkeypatch.setattr(served_model, "assign_resources", lambda _: resources)
    for config in configurations("cuda"):
        groups = [(group.kind, group.count, list(group.gpus)) for group in config.instance_group]
        assert groups == [
            (ModelInstanceGroup.KIND_GPU, 2, [0]),
            (ModelInstanceGroup.KIND_GPU, 1, [1]),
        ]

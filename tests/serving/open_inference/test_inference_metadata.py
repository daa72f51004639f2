"""Metadata, configuration, statistics, repository and health, as seen by Triton's client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from bundle_copies import linked_copy
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from in_process_server import served
from triton_requests import MODEL, images_of
from tritonclient.grpc import InferenceServerClient, InferRequestedOutput
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.model.bundle.manifest import read_manifest, write_manifest
from maskrcnn_trt.protos.inference import open_inference_pb2 as pb
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub

Encode = Callable[..., bytes]


def test_server_metadata_and_readiness(address: str, triton: InferenceServerClient) -> None:
    metadata = triton.get_server_metadata()
    assert metadata.name == "maskrcnn-trt"
    assert metadata.version
    assert "statistics" in metadata.extensions
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready(MODEL)
    assert triton.is_model_ready(f"{MODEL}-fp32", "1")
    assert not triton.is_model_ready(MODEL, "2")
    assert not triton.is_model_ready("resnet")
    models = triton.get_model_repository_index().models
    names = [MODEL, f"{MODEL}-fp32"]
    assert [(m.name, m.version, m.state) for m in models] == [(n, "1", "READY") for n in names]
    everything = triton.get_inference_statistics().model_stats
    assert [(s.name, s.version) for s in everything] == [(name, "1") for name in names]
    with grpc.insecure_channel(address) as channel:
        for service in ("inference.GRPCInferenceService", MODEL):
            health = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=30)
            assert health.status == HealthCheckResponse.SERVING


def test_metadata_and_configuration_agree(address: str, triton: InferenceServerClient) -> None:
    metadata = triton.get_model_metadata(MODEL)
    config = triton.get_model_config(MODEL).config
    assert (metadata.name, config.name) == (MODEL, MODEL)
    assert list(metadata.versions) == ["1"]
    assert config.max_batch_size == 4
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert config.dynamic_batching.default_queue_policy.default_timeout_microseconds == 0
    for tensors, configured in ((metadata.inputs, config.input), (metadata.outputs, config.output)):
        assert [t.name for t in tensors] == [c.name for c in configured]
        assert [list(t.shape) for t in tensors] == [[-1, *c.dims] for c in configured]
    shapes = {output.name: list(output.shape) for output in metadata.outputs}
    assert shapes["boxes"] == [-1, 20, 4]
    assert shapes["mask_probabilities"] == [-1, 20, 28, 28]
    with grpc.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        properties = stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL)).properties
    assert {name: value.string_value for name, value in config.parameters.items()} == dict(
        properties
    )
    assert json.loads(properties["class_names"]) == ["disc", "box", "ring"]
    assert json.loads(properties["category_ids"]) == [3, 7, 8]
    assert json.loads(properties["precisions"]) == ["fp32"]


def test_every_output_can_be_requested(triton: InferenceServerClient, picture: Encode) -> None:
    described = triton.get_model_metadata(MODEL).outputs
    outputs = [InferRequestedOutput(output.name) for output in described]
    result = triton.infer(MODEL, images_of(picture()), outputs=outputs)
    for expected, output in zip(described, result.get_response().outputs, strict=True):
        assert output.name == expected.name
        assert output.datatype == expected.datatype
        assert list(output.shape) == [1, *expected.shape[1:]]


def test_unknown_models_of_other_methods(triton: InferenceServerClient) -> None:
    for method in (
        triton.get_model_metadata,
        triton.get_model_config,
        triton.get_inference_statistics,
        triton.load_model,
        triton.unload_model,
    ):
        with pytest.raises(InferenceServerException, match="'resnet' is not served") as caught:
            method("resnet")
        assert "NOT_FOUND" in caught.value.status()


def test_unsupported_methods_are_unimplemented(triton: InferenceServerClient) -> None:
    for method, remedy in (
        (triton.get_system_shared_memory_status, "send the tensors"),
        (partial(triton.register_cuda_shared_memory, "a", b"aGFuZGxl", 0, 8), "send the tensors"),
        (triton.get_trace_settings, "--tracing"),
        (triton.get_log_settings, "--log-level"),
    ):
        with pytest.raises(InferenceServerException, match=remedy) as caught:
            method()
        assert "UNIMPLEMENTED" in caught.value.status()


def test_services_are_reflected(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        assert services == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "inference.GRPCInferenceService",
            "maskrcnn.v1.Detector",
        }
        for service in services:
            package, _, name = service.rpartition(".")
            file = database.FindFileContainingSymbol(service)
            assert file.package == package
            assert name in [described.name for described in file.service]


async def test_model_reload_under_load(address: str, picture: Encode) -> None:
    images = images_of(picture(1), picture(2))
    async with triton_aio.InferenceServerClient(address) as client:
        with pytest.raises(InferenceServerException, match="unknown parameter 'config'"):
            await client.load_model(MODEL, config="{}")
        before = await client.infer(MODEL, images)
        loading = asyncio.create_task(client.load_model(MODEL))
        while not loading.done():
            for result in await asyncio.gather(*(client.infer(MODEL, images) for _ in range(4))):
                assert result.as_numpy("num_detections").all()
        await loading
        after = await client.infer(MODEL, images)
    assert before.as_numpy("num_detections").all()
    np.testing.assert_array_equal(before.as_numpy("masks"), after.as_numpy("masks"))


async def test_bundle_is_loaded_by_its_new_name_if_it_is_valid(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    copy = linked_copy(wide_bundle, tmp_path / "bundle")
    manifest = read_manifest(wide_bundle)
    async with (
        served(copy) as address,
        triton_aio.InferenceServerClient(address) as client,
    ):
        (copy / "manifest.json").unlink()
        for name in (MODEL, "resnet"):
            with pytest.raises(InferenceServerException, match="manifest"):
                await client.load_model(name)
        write_manifest(copy, manifest.model_copy(update={"mask_side": 14}))
        with pytest.raises(InferenceServerException, match="mask_side") as caught:
            await client.load_model(MODEL)
        assert "FAILED_PRECONDITION" in caught.value.status()
        assert (await client.infer(MODEL, images_of(picture()))).as_numpy("scores").any()
        write_manifest(copy, manifest.model_copy(update={"model_name": "newer"}))
        with pytest.raises(InferenceServerException, match="'newest' is not served"):
            await client.load_model("newest")
        await client.load_model("newer")
        assert not await client.is_model_ready(MODEL)
        assert (await client.infer("newer", images_of(picture()))).as_numpy("scores").any()


async def test_stop_drains_a_stream(wide_bundle: Path, picture: Encode) -> None:
    hold = asyncio.Event()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for seed in range(3):
            yield {"model_name": MODEL, "inputs": images_of(picture(seed))}
        await hold.wait()

    async with contextlib.AsyncExitStack() as server:
        running = served(wide_bundle, max_delay_ms=100, drain_delay_s=1, stop_grace_s=30)
        address = await server.enter_async_context(running)
        async with triton_aio.InferenceServerClient(address) as client:
            stream = client.stream_infer(requests())
            _, error = await anext(stream)
            assert error is None
            stopping = asyncio.create_task(server.aclose())
            assert not await client.is_server_ready()
            assert not await client.is_model_ready(MODEL)
            (model, _) = (await client.get_model_repository_index()).models
            assert model.state == "UNAVAILABLE"
            assert "stopping" in model.reason
            for _ in range(2):
                result, error = await anext(stream)
                assert error is None
                assert result.as_numpy("scores").any()
            with pytest.raises(grpc.RpcError) as caught:
                await anext(stream)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            hold.set()
            await stopping

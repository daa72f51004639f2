"""Metadata, configuration, statistics, repository and health, as seen by Triton's client."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from triton_requests import MODEL, images_of
from tritonclient.grpc import InferenceServerClient, InferRequestedOutput
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.model.bundle.manifest import read_manifest, write_manifest
from maskrcnn_trt.protos.inference import open_inference_pb2 as pb
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]


def statistics_of(client: InferenceServerClient, name: str = MODEL) -> Any:
    (statistics,) = client.get_inference_statistics(name).model_stats
    return statistics


def test_readiness(triton: InferenceServerClient) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready(MODEL)
    assert triton.is_model_ready(f"{MODEL}-fp32", "1")
    assert not triton.is_model_ready(MODEL, "2")
    assert not triton.is_model_ready("resnet")


def test_server_metadata(triton: InferenceServerClient) -> None:
    metadata = triton.get_server_metadata()
    assert metadata.name == "maskrcnn-trt"
    assert metadata.version
    assert "statistics" in metadata.extensions


def test_metadata_and_configuration_agree(triton: InferenceServerClient) -> None:
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


def test_every_output_can_be_requested(triton: InferenceServerClient, picture: Encode) -> None:
    described = triton.get_model_metadata(MODEL).outputs
    outputs = [InferRequestedOutput(output.name) for output in described]
    result = triton.infer(MODEL, images_of(picture()), outputs=outputs)
    for expected, output in zip(described, result.get_response().outputs, strict=True):
        assert output.name == expected.name
        assert output.datatype == expected.datatype
        assert list(output.shape) == [1, *expected.shape[1:]]


def test_class_names_are_properties(address: str, triton: InferenceServerClient) -> None:
    with grpc.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        properties = stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL)).properties
    assert json.loads(properties["class_names"]) == ["disc", "box", "ring"]
    assert json.loads(properties["category_ids"]) == [3, 7, 8]
    assert json.loads(properties["precisions"]) == ["fp32"]
    parameters = triton.get_model_config(MODEL).config.parameters
    assert {name: value.string_value for name, value in parameters.items()} == dict(properties)


def test_requests_are_counted(triton: InferenceServerClient, picture: Encode) -> None:
    before = statistics_of(triton)
    triton.infer(MODEL, images_of(picture(0), picture(1), picture(2)))
    triton.infer(MODEL, images_of(picture(3)))
    with pytest.raises(InferenceServerException):
        triton.infer(MODEL, images_of(b"no image"))
    after = statistics_of(triton)
    stats, stats_before = after.inference_stats, before.inference_stats
    assert after.inference_count - before.inference_count == 4
    assert 2 <= after.execution_count - before.execution_count <= 4
    assert stats.success.count - stats_before.success.count == 2
    assert stats.fail.count - stats_before.fail.count == 1
    stages = [stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output]
    assert all(stage.count == stats.success.count for stage in stages)
    assert 0 < sum(stage.ns for stage in stages) <= stats.success.ns
    batches = after.batch_stats
    assert sum(b.batch_size * b.compute_infer.count for b in batches) == after.inference_count
    assert all(b.compute_infer.ns for b in batches)
    assert after.last_inference > before.last_inference


def test_statistics_of_all_models(triton: InferenceServerClient) -> None:
    everything = triton.get_inference_statistics().model_stats
    assert [(s.name, s.version) for s in everything] == [(MODEL, "1"), (f"{MODEL}-fp32", "1")]


def test_repository_index(triton: InferenceServerClient) -> None:
    models = triton.get_model_repository_index().models
    assert [(m.name, m.version, m.state) for m in models] == [
        (MODEL, "1", "READY"),
        (f"{MODEL}-fp32", "1", "READY"),
    ]


@pytest.mark.parametrize(
    "method",
    [
        InferenceServerClient.get_model_metadata,
        InferenceServerClient.get_model_config,
        InferenceServerClient.get_inference_statistics,
        InferenceServerClient.load_model,
        InferenceServerClient.unload_model,
    ],
)
def test_unknown_models_of_other_methods(triton: InferenceServerClient, method: Any) -> None:
    with pytest.raises(InferenceServerException, match="model 'resnet' is not served") as caught:
        method(triton, "resnet")
    assert "NOT_FOUND" in caught.value.status()


@pytest.mark.parametrize(
    "method",
    [
        lambda client: client.get_system_shared_memory_status(),
        lambda client: client.get_trace_settings(),
        lambda client: client.get_log_settings(),
    ],
)
def test_unsupported_methods_are_unimplemented(triton: InferenceServerClient, method: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        method(triton)
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


def test_model_reload(triton: InferenceServerClient, picture: Encode) -> None:
    before = triton.infer(MODEL, images_of(picture()))
    triton.load_model(MODEL)
    after = triton.infer(MODEL, images_of(picture()))
    np.testing.assert_array_equal(before.as_numpy("masks"), after.as_numpy("masks"))
    with pytest.raises(InferenceServerException, match="unknown parameter 'config'"):
        triton.load_model(MODEL, config="{}")


def test_model_reload_under_load(address: str, picture: Encode) -> None:
    async def run() -> list[Any]:
        async with triton_aio.InferenceServerClient(address) as client:
            loading = asyncio.create_task(client.load_model(MODEL))
            results = []
            while not loading.done():
                images = images_of(picture(1), picture(2))
                calls = [client.infer(MODEL, images) for _ in range(4)]
                results.extend(await asyncio.gather(*calls))
            await loading
            return results

    results = asyncio.run(run())
    assert results
    assert all(result.as_numpy("num_detections").all() for result in results)


@pytest.mark.parametrize("service", ["inference.GRPCInferenceService", MODEL])
def test_health_of_service_and_model(address: str, service: str) -> None:
    with grpc.insecure_channel(address) as channel:
        response = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=30)
    assert response.status == HealthCheckResponse.SERVING


def test_invalid_bundle_is_not_loaded(bundle: Path, tmp_path: Path, picture: Encode) -> None:
    copy = tmp_path / "bundle"
    copy.mkdir()
    for path in bundle.iterdir():
        (copy / path.name).symlink_to(path)

    async def run() -> str:
        async with (
            detection_server(copy, ServeConfig(port=0)) as address,
            triton_aio.InferenceServerClient(address) as client,
        ):
            (copy / "manifest.json").unlink()
            for name in (MODEL, "resnet"):
                with pytest.raises(InferenceServerException, match="manifest"):
                    await client.load_model(name)
            write_manifest(copy, read_manifest(bundle).model_copy(update={"mask_side": 14}))
            with pytest.raises(InferenceServerException, match="mask_side") as caught:
                await client.load_model(MODEL)
            assert (await client.infer(MODEL, images_of(picture()))).as_numpy("scores").any()
            return str(caught.value.status())

    assert "FAILED_PRECONDITION" in asyncio.run(run())


def test_bundle_with_a_new_name_is_loaded_by_that_name(
    bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)

    async def run() -> None:
        async with (
            detection_server(copy, ServeConfig(port=0)) as address,
            triton_aio.InferenceServerClient(address) as client,
        ):
            write_manifest(copy, read_manifest(copy).model_copy(update={"model_name": "newer"}))
            with pytest.raises(InferenceServerException, match="'newest' is not served"):
                await client.load_model("newest")
            await client.load_model("newer")
            assert not await client.is_model_ready(MODEL)
            assert (await client.infer("newer", images_of(picture()))).as_numpy("scores").any()

    asyncio.run(run())


def test_stop_drains_a_stream(bundle: Path, picture: Encode) -> None:
    async def requests(hold: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
        for seed in range(3):
            yield {"model_name": MODEL, "inputs": images_of(picture(seed))}
        await hold.wait()

    async def run() -> int:
        hold = asyncio.Event()
        responses = 0
        async with contextlib.AsyncExitStack() as server:
            config = ServeConfig(port=0, max_delay_ms=100, drain_delay_s=1)
            address = await server.enter_async_context(detection_server(bundle, config))
            async with triton_aio.InferenceServerClient(address) as client:
                stream = client.stream_infer(requests(hold))
                result, error = await anext(stream)
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
                    responses += bool(result.as_numpy("scores").any())
                with pytest.raises(grpc.RpcError) as caught:
                    await anext(stream)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                hold.set()
                await stopping
        return responses

    assert asyncio.run(run()) == 2

"""A server whose model is unloaded and loaded again, and what clients see of that."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from gated_engine import Gate
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from scraped_metrics import Metrics, metrics_in
from triton_requests import MODEL, images_of
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.server import detection_server
from maskrcnn_trt.serving.transport.health import LIVENESS

Status = HealthCheckResponse

NAMES = [MODEL, f"{MODEL}-fp32"]
UNLOADED = f"model '{MODEL}' is unloaded; load it with RepositoryModelLoad"


class Served(NamedTuple):
    """A server that computes image by image, and its clients."""

    triton: triton_aio.InferenceServerClient
    detector: Any
    inference: Any
    health: Any
    metrics: Metrics
    stop: Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(
    path: Path, log: pytest.LogCaptureFixture, reload: asyncio.Event | None = None
) -> AsyncIterator[Served]:
    """Serve a bundle within the context, or until it is told to stop."""
    config = ServeConfig(port=0, metrics_port=0, max_batch=1, drain_delay_s=0)
    log.set_level("INFO")
    async with contextlib.AsyncExitStack() as server:
        address = await server.enter_async_context(detection_server(path, config, reload))
        async with (
            triton_aio.InferenceServerClient(address) as triton,
            grpc.aio.insecure_channel(address) as channel,
        ):
            yield Served(
                triton,
                DetectorStub(channel),
                GRPCInferenceServiceStub(channel),
                HealthStub(channel),
                metrics_in(log.text),
                server.aclose,
            )


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def until_not_ready(server: Served) -> None:
    async with asyncio.timeout(60):
        while await server.triton.is_server_ready():
            await asyncio.sleep(0.01)


async def held_request(server: Served, gate: Gate, image: bytes) -> Any:
    """A request that the gate, which it closes, holds before the model."""
    number = gate.count
    gate.close()
    call = asyncio.ensure_future(server.detector.Detect(pb.DetectRequest(image=image)))
    await gate.comes_to(number + 1)
    return call


async def held_unload(server: Served, gate: Gate, image: bytes) -> tuple[Any, Any]:
    """A request that the gate holds, and the call to unload the model, which waits for it."""
    in_progress = await held_request(server, gate, image)
    unloading = server.inference.RepositoryModelUnload(
        inference.RepositoryModelUnloadRequest(model_name=MODEL)
    )
    await until_not_ready(server)
    return in_progress, unloading


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details() or ""


async def assert_unloaded(served: Served, image: bytes) -> None:
    """Requests of each kind are refused, and all that tells of health says why."""
    triton, detector = served.triton, served.detector
    call = detector.Detect(pb.DetectRequest(image=image))
    status, message = await status_of(call)
    assert status is grpc.StatusCode.UNAVAILABLE
    assert UNLOADED in message
    with pytest.raises(InferenceServerException, match=UNLOADED) as caught:
        await triton.infer(MODEL, images_of(image))
    assert "UNAVAILABLE" in caught.value.status()
    with pytest.raises(InferenceServerException, match="model 'resnet' is not served"):
        await triton.infer("resnet", images_of(image))
    assert await triton.is_server_live()
    assert not await triton.is_server_ready()
    index = (await triton.get_model_repository_index()).models
    expected = [(name, "UNAVAILABLE", "unloaded") for name in NAMES]
    assert [(model.name, model.state, model.reason) for model in index] == expected
    for name in NAMES:
        assert not await triton.is_model_ready(name)
    for service in ("", "maskrcnn.v1.Detector", *NAMES, LIVENESS):
        expected_status = Status.SERVING if service == LIVENESS else Status.NOT_SERVING
        answer = await served.health.Check(HealthCheckRequest(service=service))
        assert answer.status == expected_status


async def assert_serving(served: Served, image: bytes) -> None:
    assert (await served.detector.Detect(pb.DetectRequest(image=image))).detections
    assert (await served.triton.infer(MODEL, images_of(image))).as_numpy("num_detections").all()
    assert await served.triton.is_server_ready()
    assert await served.triton.is_model_ready(MODEL)
    assert (await served.health.Check(HealthCheckRequest())).status == Status.SERVING

"""Server with clients of all services, and checks of an unloaded and a reloaded model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from gated_engine import Gate
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from in_process_server import status_of
from scraped_metrics import Metrics, metrics_from_log
from triton_requests import MODEL, images_of
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.pipeline.served_model import ModelSource
from maskrcnn_trt.serving.rpc.services import LIVENESS
from maskrcnn_trt.serving.server import detection_server

Status = HealthCheckResponse

NAMES = [MODEL, f"{MODEL}-fp32"]
UNLOADED = f"model '{MODEL}' is unloaded; load it with RepositoryModelLoad"


class RunningServer(NamedTuple):
    """Running server, and clients of all its services."""

    triton: triton_aio.InferenceServerClient
    detector: Any
    inference: Any
    health: Any
    metrics: Metrics
    stop: Callable[[], Awaitable[None]]
    address: str


@contextlib.asynccontextmanager
async def serving(
    models: Path | Sequence[ModelSource],
    log: pytest.LogCaptureFixture,
    reload: asyncio.Event | None = None,
    **settings: Any,
) -> AsyncIterator[RunningServer]:
    """Serve one or more bundles until the context ends or `RunningServer.stop` is called.

    By default, each batch has one image.
    """
    config = ServeConfig(port=0, metrics_port=0, drain_delay_s=0, **{"max_batch": 1} | settings)
    log.set_level("INFO")
    async with contextlib.AsyncExitStack() as server:
        address = await server.enter_async_context(detection_server(models, config, reload))
        async with (
            triton_aio.InferenceServerClient(address) as triton,
            grpc.aio.insecure_channel(address) as channel,
        ):
            yield RunningServer(
                triton,
                DetectorStub(channel),
                GRPCInferenceServiceStub(channel),
                HealthStub(channel),
                metrics_from_log(log.text),
                server.aclose,
                address,
            )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def until_not_ready(server: RunningServer) -> None:
    async with asyncio.timeout(60):
        while await server.triton.is_server_ready():
            await asyncio.sleep(0.01)


async def held_request(server: RunningServer, gate: Gate, image: bytes) -> Any:
    """Close the gate and send a request. Return the call, whose batch waits at the gate."""
    number = gate.count
    gate.close()
    call = asyncio.ensure_future(server.detector.Detect(pb.DetectRequest(image=image)))
    await gate.comes_to(number + 1)
    return call


async def held_unload(server: RunningServer, gate: Gate, image: bytes) -> tuple[Any, Any]:
    """Send a request that waits at the gate, then a call that unloads the model. Return both."""
    in_progress = await held_request(server, gate, image)
    unloading = server.inference.RepositoryModelUnload(
        inference.RepositoryModelUnloadRequest(model_name=MODEL)
    )
    await until_not_ready(server)
    return in_progress, unloading


async def assert_unloaded(server: RunningServer, image: bytes) -> None:
    """Check that each kind of request is rejected, and that health methods report the unloading."""
    triton, detector = server.triton, server.detector
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
        answer = await server.health.Check(HealthCheckRequest(service=service))
        assert answer.status == expected_status


async def assert_serving(server: RunningServer, image: bytes) -> None:
    assert (await server.detector.Detect(pb.DetectRequest(image=image))).detections
    assert (await server.triton.infer(MODEL, images_of(image))).as_numpy("num_detections").all()
    assert await server.triton.is_server_ready()
    assert await server.triton.is_model_ready(MODEL)
    assert (await server.health.Check(HealthCheckRequest())).status == Status.SERVING

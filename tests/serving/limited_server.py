"""A server in this process with limits of the test's own, and how it fares."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.server import detection_server


@contextlib.asynccontextmanager
async def served(bundle: Path, **settings: Any) -> AsyncIterator[str]:
    settings = {"max_delay_ms": 0, "drain_delay_s": 0, "stop_grace_s": 0} | settings
    async with detection_server(bundle, ServeConfig(port=0, **settings)) as address:
        yield address


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details() or ""


async def answers_rightly(address: str, image: bytes, *, in_time: bool = False) -> bool:
    """Whether a new client is served at once, or in time if that will do."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = DetectorStub(channel)
        request = pb.DetectRequest(id="new", image=image)
        response = await stub.Detect(request, timeout=60, wait_for_ready=in_time)
        return response.id == "new" and len(response.detections) > 0

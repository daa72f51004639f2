"""A server that does as it is told, and both clients of it."""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import (
    DetectorServicer,
    add_DetectorServicer_to_server,
)
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections

IMAGE = b"an image" * 100_000


@dataclass
class Detector(DetectorServicer):  # type: ignore[misc]  # generated, it has no types
    """Refuses as often as it is told to, then finds nothing in an image as high as it has bytes."""

    refusals: list[grpc.StatusCode] = field(default_factory=list)
    token: str | None = None
    calls: int = 0
    asked: pb.DetectRequest | None = None

    def Detect(self, request: pb.DetectRequest, context: Any) -> pb.DetectResponse:  # noqa: N802
        self.calls += 1
        self.asked = request
        sent = dict(context.invocation_metadata()).get("authorization")
        if self.token is not None and sent != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")
        if self.refusals:
            context.abort(self.refusals.pop(0), "not now")
        return pb.DetectResponse(height=len(request.image))

    def DetectStream(  # noqa: N802
        self, requests: Iterator[pb.DetectRequest], context: Any
    ) -> Iterator[pb.DetectStreamResponse]:
        for request in requests:
            self.calls += 1
            self.asked = request
            response = pb.DetectResponse(height=len(request.image))
            if self.refusals:
                refusal = pb.Error(code=self.refusals.pop(0).value[0], message="not now")
                yield pb.DetectStreamResponse(id=request.id, error=refusal)
            else:
                yield pb.DetectStreamResponse(id=request.id, response=response)


@contextlib.contextmanager
def serving(
    detector: Detector,
    credentials: grpc.ServerCredentials | None = None,
    address: str = "localhost:0",
) -> Iterator[str]:
    server = grpc.server(
        ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 2 * len(IMAGE))]
    )
    add_DetectorServicer_to_server(detector, server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        server.stop(None).wait()


def detect(address: str, **options: Any) -> Detections:
    with DetectorClient(address, **options) as detector:
        return detector.detect(IMAGE)


def detect_async(address: str, **options: Any) -> Detections:
    async def ask() -> Detections:
        async with AsyncDetectorClient(address, **options) as detector:
            return await detector.detect(IMAGE)

    return asyncio.run(ask())


both_ways = pytest.mark.parametrize("ask", [detect, detect_async])
"""Has a test ask by either client."""

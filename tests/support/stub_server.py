"""Stub gRPC server with scripted responses, and a decorator that runs a test with both clients."""

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

IMAGE = b"\xff\xd8\xff" + b"an image" * 100_000


@dataclass
class StubDetector(DetectorServicer):  # type: ignore[misc]  # generated, it has no types
    """Stub of the service Detector. It first returns `errors`, one per request, then empty results.

    The height in a result is the size of the encoded image in bytes.
    """

    errors: list[grpc.StatusCode] = field(default_factory=list)
    token: str | None = None
    calls: int = 0
    last_request: pb.DetectRequest | None = None

    def Detect(self, request: pb.DetectRequest, context: Any) -> pb.DetectResponse:  # noqa: N802
        self.calls += 1
        self.last_request = request
        sent = dict(context.invocation_metadata()).get("authorization")
        if self.token is not None and sent != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")
        if self.errors:
            context.abort(self.errors.pop(0), "not now")
        return pb.DetectResponse(height=len(request.image))

    def DetectStream(  # noqa: N802
        self, requests: Iterator[pb.DetectRequest], context: Any
    ) -> Iterator[pb.DetectStreamResponse]:
        for request in requests:
            self.calls += 1
            self.last_request = request
            response = pb.DetectResponse(height=len(request.image))
            if self.errors:
                error = pb.Error(code=self.errors.pop(0).value[0], message="not now")
                yield pb.DetectStreamResponse(id=request.id, error=error)
            else:
                yield pb.DetectStreamResponse(id=request.id, response=response)


@contextlib.contextmanager
def stub_server(
    detector: StubDetector,
    credentials: grpc.ServerCredentials | None = None,
    address: str | None = None,
) -> Iterator[str]:
    """Serve a stub within the context, and yield its address."""
    # Use more threads than a test blocks at the same time.
    server = grpc.server(
        ThreadPoolExecutor(32), options=[("grpc.max_receive_message_length", 2 * len(IMAGE))]
    )
    add_DetectorServicer_to_server(detector, server)
    # Certificates are for `localhost`. This name has two addresses (IPv4 and IPv6), and another
    # server can have the same port on one of them. Without certificates, use the IPv4 address.
    host = "127.0.0.1" if credentials is None else "localhost"
    if credentials is None:
        port = server.add_insecure_port(address or f"{host}:0")
    else:
        port = server.add_secure_port(address or f"{host}:0", credentials)
    server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop(None).wait()


def detect(address: str, image: bytes = IMAGE, **options: Any) -> Detections:
    with DetectorClient(address, **options) as client:
        return client.detect(image)


def detect_async(address: str, image: bytes = IMAGE, **options: Any) -> Detections:
    async def run() -> Detections:
        async with AsyncDetectorClient(address, **options) as client:
            return await client.detect(image)

    return asyncio.run(run())


# Decorator that runs a test with the sync and with the async client, as its argument `detect`.
both_clients = pytest.mark.parametrize("detect", [detect, detect_async], ids=["sync", "async"])

"""Server in the test process, and clients with connections of their own."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.pipeline.served_model import ModelSource
from maskrcnn_trt.serving.server import detection_server

# Folder of one bundle, or the bundles and names of several models.
Models = Path | Sequence[ModelSource]

# Channel option: share no connection with the process's other channels.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@contextlib.asynccontextmanager
async def served(models: Models, **settings: Any) -> AsyncIterator[str]:
    """Serve models on a free port, and yield the address. By default, all delays are 0."""
    settings = {"max_delay_ms": 0, "drain_delay_s": 0, "stop_grace_s": 0} | settings
    async with detection_server(models, ServeConfig(port=0, **settings)) as address:
        yield address


@contextlib.contextmanager
def served_in_thread(models: Models, **settings: Any) -> Iterator[str]:
    """Serve models like `served` from another thread, for tests that share the server."""
    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        try:
            async with served(models, **settings) as address:
                ready.set_result((address, asyncio.get_running_loop(), stop))
                await stop.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, stop = ready.result()
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextlib.asynccontextmanager
async def connected(
    address: str, stub: Callable[[grpc.aio.Channel], Any] = DetectorStub
) -> AsyncIterator[Any]:
    """Create a stub with a connection of its own."""
    async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        yield stub(channel)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status code and message of a call."""
    return await call.code(), await call.details() or ""


async def gets_detections(address: str, image: bytes, *, wait: bool = False) -> bool:
    """Return whether a new client gets detections.

    Args:
        address: Address of the server.
        image: Encoded image.
        wait: Retry to connect for up to 60 s. False: fail if the server rejects the connection.
    """
    async with connected(address) as stub:
        request = pb.DetectRequest(id="new", image=image)
        response = await stub.Detect(request, timeout=60, wait_for_ready=wait)
        return response.id == "new" and len(response.detections) > 0

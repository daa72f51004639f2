"""Closed clients: before a call and during a call."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from stub_server import StubDetector, stub_server

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.errors import ClosedError

IMAGES = [b"an image"] * 9


class BlockingDetector(StubDetector):
    """Stub that blocks each call until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.called = threading.Event()
        self.release = threading.Event()

    def _wait(self) -> None:
        self.called.set()
        self.release.wait(60)

    def Detect(self, request: pb.DetectRequest, context: Any) -> pb.DetectResponse:  # noqa: N802
        self._wait()
        return super().Detect(request, context)

    def DetectStream(  # noqa: N802
        self, requests: Iterator[pb.DetectRequest], context: Any
    ) -> Iterator[pb.DetectStreamResponse]:
        self._wait()
        yield from super().DetectStream(requests, context)

    def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: Any
    ) -> pb.GetModelResponse:
        self._wait()
        return pb.GetModelResponse()


@pytest.fixture
def blocking() -> Iterator[tuple[str, BlockingDetector]]:
    detector = BlockingDetector()
    with stub_server(detector) as address:
        yield address, detector
        detector.release.set()


# Arguments by method.
METHODS: dict[str, tuple[Any, ...]] = {
    "detect": (IMAGES[0],),
    "detect_many": (IMAGES,),
    "stream": (IMAGES,),
    "model": (),
}
methods = pytest.mark.parametrize("method", METHODS)


def use(client: DetectorClient, method: str) -> None:
    """Call a method and read all its results."""
    result = getattr(client, method)(*METHODS[method])
    if isinstance(result, Iterator):
        list(result)


async def use_async(client: AsyncDetectorClient, method: str) -> None:
    result = getattr(client, method)(*METHODS[method])
    if isinstance(result, AsyncIterator):
        _ = [outcome async for outcome in result]
    else:
        await result


@methods
def test_closed_client_raises(method: str) -> None:
    client = DetectorClient("localhost:1")
    for _ in range(2):
        client.close()
        with pytest.raises(ClosedError, match="localhost:1 is closed"):
            use(client, method)


@methods
async def test_closed_async_client_raises(method: str) -> None:
    client = AsyncDetectorClient("localhost:1")
    for _ in range(2):
        await client.close()
        with pytest.raises(ClosedError, match="localhost:1 is closed"):
            await use_async(client, method)


@methods
def test_async_client_belongs_to_one_event_loop(method: str) -> None:
    async def create() -> AsyncDetectorClient:
        return AsyncDetectorClient("localhost:1")

    remedy = "create an AsyncDetectorClient in the coroutine that uses it"
    with pytest.raises(RuntimeError, match=f"no event loop is running; {remedy}"):
        AsyncDetectorClient("localhost:1")
    client = asyncio.run(create())
    with pytest.raises(RuntimeError, match=f"another event loop; {remedy}"):
        asyncio.run(use_async(client, method))


@methods
def test_closing_a_client_ends_pending_calls(
    method: str, blocking: tuple[str, BlockingDetector]
) -> None:
    address, detector = blocking
    client = DetectorClient(address)

    def close() -> None:
        detector.called.wait(60)
        client.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClosedError):
        use(client, method)
    closing.join()


@methods
async def test_closing_an_async_client_ends_pending_calls(
    method: str, blocking: tuple[str, BlockingDetector]
) -> None:
    address, detector = blocking
    client = AsyncDetectorClient(address)
    call = asyncio.create_task(use_async(client, method))
    await asyncio.to_thread(detector.called.wait, 60)
    await client.close()
    with pytest.raises(ClosedError):
        await call
    assert not call.cancelled()


@methods
async def test_cancelled_task_raises_cancelled_error(
    method: str, blocking: tuple[str, BlockingDetector]
) -> None:
    address, detector = blocking
    for closed in (False, True):
        detector.called.clear()
        client = AsyncDetectorClient(address)
        call = asyncio.create_task(use_async(client, method))
        await asyncio.to_thread(detector.called.wait, 60)
        call.cancel()
        if closed:
            await client.close()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert call.cancelled()
        await client.close()

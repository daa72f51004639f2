"""Closed clients: before a call and during a call."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stub_server import StubDetector, stub_server

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.errors import ClosedError

IMAGES = [b"an image"] * 9

# Call of a client method, to its end.
Use = Callable[[Any], Any]


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


async def collect(results: Any) -> list[Any]:
    return [result async for result in results]


uses = pytest.mark.parametrize(
    "use",
    [
        lambda client: client.detect(IMAGES[0]),
        lambda client: list(client.detect_many(IMAGES)),
        lambda client: list(client.stream(IMAGES)),
        lambda client: client.model(),
    ],
    ids=["detect", "detect_many", "stream", "model"],
)
async_uses = pytest.mark.parametrize(
    "use",
    [
        lambda client: client.detect(IMAGES[0]),
        lambda client: collect(client.detect_many(IMAGES)),
        lambda client: collect(client.stream(IMAGES)),
        lambda client: client.model(),
    ],
    ids=["detect", "detect_many", "stream", "model"],
)


@uses
def test_closed_client_raises(use: Use) -> None:
    client = DetectorClient("localhost:1")
    for _ in range(2):
        client.close()
        with pytest.raises(ClosedError, match="localhost:1 is closed"):
            use(client)


@async_uses
def test_closed_async_client_raises(use: Use) -> None:
    async def run() -> None:
        client = AsyncDetectorClient("localhost:1")
        for _ in range(2):
            await client.close()
            with pytest.raises(ClosedError, match="localhost:1 is closed"):
                await use(client)

    asyncio.run(run())


@uses
def test_closing_a_client_ends_pending_calls(
    use: Use, blocking: tuple[str, BlockingDetector]
) -> None:
    address, detector = blocking
    client = DetectorClient(address)

    def close() -> None:
        detector.called.wait(60)
        client.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClosedError):
        use(client)
    closing.join()


@async_uses
def test_closing_an_async_client_ends_pending_calls(
    use: Use, blocking: tuple[str, BlockingDetector]
) -> None:
    address, detector = blocking

    async def run() -> None:
        client = AsyncDetectorClient(address)
        call = asyncio.create_task(use(client))
        await asyncio.to_thread(detector.called.wait, 60)
        await client.close()
        with pytest.raises(ClosedError):
            await call
        assert not call.cancelled()

    asyncio.run(run())


@async_uses
def test_cancelled_task_raises_cancelled_error(
    use: Use, blocking: tuple[str, BlockingDetector]
) -> None:
    address, detector = blocking

    async def run() -> None:
        for closed in (False, True):
            detector.called.clear()
            client = AsyncDetectorClient(address)
            call = asyncio.create_task(use(client))
            await asyncio.to_thread(detector.called.wait, 60)
            call.cancel()
            if closed:
                await client.close()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert call.cancelled()
            await client.close()

    asyncio.run(run())

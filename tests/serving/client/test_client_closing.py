"""Clients that are closed, before they are asked and while they wait."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stub_server import Detector, serving

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.errors import ClosedError

IMAGES = [b"an image"] * 9

Use = Callable[[Any], Any]
"""What is asked of a client, to its end."""


class Waiting(Detector):
    """Answers nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_for_one = threading.Event()
        self.going_on = threading.Event()

    def _wait(self) -> None:
        self.asked_for_one.set()
        self.going_on.wait(60)

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
def waiting() -> Iterator[tuple[str, Waiting]]:
    detector = Waiting()
    with serving(detector) as address:
        yield address, detector
        detector.going_on.set()


async def all_of(results: Any) -> list[Any]:
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
        lambda client: all_of(client.detect_many(IMAGES)),
        lambda client: all_of(client.stream(IMAGES)),
        lambda client: client.model(),
    ],
    ids=["detect", "detect_many", "stream", "model"],
)


@uses
def test_client_that_is_closed_says_so(use: Use) -> None:
    client = DetectorClient("localhost:1")
    for _ in range(2):
        client.close()
        with pytest.raises(ClosedError, match="the client of localhost:1 is closed"):
            use(client)


@async_uses
def test_async_client_that_is_closed_says_so(use: Use) -> None:
    async def ask() -> None:
        client = AsyncDetectorClient("localhost:1")
        for _ in range(2):
            await client.close()
            with pytest.raises(ClosedError, match="the client of localhost:1 is closed"):
                await use(client)

    asyncio.run(ask())


@uses
def test_client_that_is_closed_while_it_waits_says_so(
    use: Use, waiting: tuple[str, Waiting]
) -> None:
    address, detector = waiting
    client = DetectorClient(address)

    def close() -> None:
        detector.asked_for_one.wait(60)
        client.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClosedError):
        use(client)
    closing.join()


@async_uses
def test_async_client_that_is_closed_while_it_waits_says_so(
    use: Use, waiting: tuple[str, Waiting]
) -> None:
    address, detector = waiting

    async def ask() -> None:
        client = AsyncDetectorClient(address)
        asked = asyncio.create_task(use(client))
        await asyncio.to_thread(detector.asked_for_one.wait, 60)
        await client.close()
        with pytest.raises(ClosedError):
            await asked
        assert not asked.cancelled()

    asyncio.run(ask())


@async_uses
def test_task_that_is_cancelled_sees_that(use: Use, waiting: tuple[str, Waiting]) -> None:
    address, detector = waiting

    async def ask() -> None:
        for closed in (False, True):
            detector.asked_for_one.clear()
            client = AsyncDetectorClient(address)
            asked = asyncio.create_task(use(client))
            await asyncio.to_thread(detector.asked_for_one.wait, 60)
            asked.cancel()
            if closed:
                await client.close()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert asked.cancelled()
            await client.close()

    asyncio.run(ask())

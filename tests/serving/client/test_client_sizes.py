"""Clients that have a request for which the server's limit is too low."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from limited_server import served
from many_requests import Run, both_runs
from stub_server import IMAGE, Detector, serving
from tcp_proxy import proxied

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import RefusedError

Encode = Callable[..., bytes]

LARGE = bytes(5 << 20)
REFUSAL = (
    r"the request has 5,242,\d\d\d bytes, and the server at 127\S+ takes 2,097,152 at most; send a "
    r"smaller image, or give the server a higher --max-message-mb"
)


class Limited(Detector):
    """Says that it takes messages of so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.questions = 0

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        self.questions += 1
        return pb.GetModelResponse(limits=pb.Limits(max_message_bytes=self.limit))


def detect(address: str, image: bytes, **options: Any) -> Detections:
    with DetectorClient(address, **options) as client:
        return client.detect(image)


def detect_async(address: str, image: bytes, **options: Any) -> Detections:
    async def ask() -> Detections:
        async with AsyncDetectorClient(address, **options) as client:
            return await client.detect(image)

    return asyncio.run(ask())


def stream(address: str, image: bytes, **options: Any) -> list[Any]:
    with DetectorClient(address, **options) as client:
        return list(client.stream([image]))


def stream_async(address: str, image: bytes, **options: Any) -> list[Any]:
    async def ask() -> list[Any]:
        async with AsyncDetectorClient(address, **options) as client:
            return [outcome async for outcome in client.stream([image])]

    return asyncio.run(ask())


all_calls = pytest.mark.parametrize("ask", [detect, detect_async, stream, stream_async])


@all_calls
def test_request_larger_than_the_limit_is_not_sent(bundle: Path, ask: Callable[..., Any]) -> None:
    async def try_to() -> None:
        async with served(bundle, max_message_mb=2) as address, proxied(address) as proxy:
            with pytest.raises(RefusedError, match=REFUSAL) as caught:
                await asyncio.to_thread(ask, proxy.address, LARGE)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert 0 < proxy.sent < 10_000

    asyncio.run(try_to())


@all_calls
def test_limit_that_the_client_did_not_ask_for_is_named_too(
    bundle: Path, ask: Callable[..., Any]
) -> None:
    async def try_to() -> None:
        async with served(bundle, max_message_mb=1) as address:
            with pytest.raises(
                RefusedError,
                match=r"larger than the server at .* 1048576\)\); send a smaller image",
            ) as caught:
                await asyncio.to_thread(ask, address, LARGE[: 3 << 20], retries=0)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(try_to())


@both_runs
def test_limit_is_asked_for_once_and_others_are_served(run: Callable[..., Run]) -> None:
    detector = Limited(len(LARGE))
    images = [b"a", LARGE, b"ccc", LARGE, LARGE, LARGE, IMAGE]
    with serving(detector) as address:
        found = run(address, images)
    assert detector.questions == 1
    assert detector.calls == 3
    assert found.end is None
    assert [o.height for o in found.outcomes if isinstance(o, Detections)] == [1, 3, len(IMAGE)]
    refused = [o for o in found.outcomes if isinstance(o, RefusedError)]
    assert {error.code for error in refused} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert [found.outcomes.index(error) for error in refused] == [1, 3, 4, 5]


@both_runs
def test_request_below_a_high_limit_is_sent(run: Callable[..., Run]) -> None:
    # Which this server has only said; gRPC's own is lower.
    with serving(Limited(1 << 30)) as address:
        (outcome,) = run(address, [LARGE], retries=0).outcomes
    assert isinstance(outcome, RefusedError)
    assert "Received message larger than max" in str(outcome)


def test_stream_answers_what_came_before(address: str, picture: Encode) -> None:
    found: list[int] = []

    def images() -> Iterator[bytes]:
        yield picture(0)
        yield picture(1)
        yield LARGE
        raise AssertionError("nothing was to be asked for after that")

    with DetectorClient(address) as client:
        with pytest.raises(RefusedError, match="5,242,"):
            found.extend(place for place, _ in client.stream(images()))
        assert len(client.detect(picture()))
    assert sorted(found) == [0, 1]

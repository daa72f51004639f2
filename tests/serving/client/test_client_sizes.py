"""Requests that exceed the server's message limit."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from http_server import free_port
from many_requests import Run, both_runs
from stub_server import IMAGE, StubDetector, detect, detect_async, stub_server
from tcp_proxy import proxied

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import RefusedError, UnreachableError

Encode = Callable[..., bytes]

LARGE = bytes(5 << 20)
TOO_LARGE = r"[35],\d+,\d+ bytes.* 127\S+ .*2,097,152.*--max-message-mb"


class LimitedDetector(StubDetector):
    """Stub that reports a message limit, in bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.model_calls = 0

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        self.model_calls += 1
        return pb.GetModelResponse(limits=pb.Limits(max_message_bytes=self.limit))


def stream(address: str, image: bytes, **options: Any) -> list[Any]:
    with DetectorClient(address, **options) as client:
        return list(client.stream([image]))


def stream_async(address: str, image: bytes, **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with AsyncDetectorClient(address, **options) as client:
            return [outcome async for outcome in client.stream([image])]

    return asyncio.run(run())


all_methods = pytest.mark.parametrize("detect_one", [detect, detect_async, stream, stream_async])


@all_methods
@pytest.mark.parametrize("size", [3 << 20, len(LARGE)])  # below and above gRPC's default limit
async def test_request_larger_than_the_limit_is_not_sent(
    address: str, detect_one: Callable[..., Any], size: int
) -> None:
    async with proxied(address) as proxy:
        with pytest.raises(RefusedError, match=TOO_LARGE) as caught:
            await asyncio.to_thread(detect_one, proxy.address, LARGE[:size])
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert 0 < proxy.sent < 10_000


@both_runs
def test_limit_is_fetched_once_and_other_images_are_sent(run: Callable[..., Run]) -> None:
    detector = LimitedDetector(len(LARGE))
    images = [b"a", LARGE, b"ccc", LARGE, LARGE, LARGE, IMAGE]
    with stub_server(detector) as address:
        result = run(address, images)
    assert detector.model_calls == 1
    assert detector.calls == 3
    assert result.error is None
    assert [o.height for o in result.outcomes if isinstance(o, Detections)] == [1, 3, len(IMAGE)]
    refused = [o for o in result.outcomes if isinstance(o, RefusedError)]
    assert {error.code for error in refused} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert [result.outcomes.index(error) for error in refused] == [1, 3, 4, 5]


@both_runs
def test_limit_is_not_fetched_again_from_an_unreachable_server(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches: list[Any] = []
    for kind in (DetectorClient, AsyncDetectorClient):
        fetch: Any = kind.model
        monkeypatch.setattr(kind, "model", lambda own, f=fetch: fetches.append(own) or f(own))
    result = run(f"127.0.0.1:{free_port()}", [LARGE] * 4, concurrency=4, retries=1)
    assert isinstance(result.error, UnreachableError)
    assert len(fetches) == 1


@all_methods
def test_rejection_by_the_server_names_the_remedy(detect_one: Callable[..., Any]) -> None:
    # The stub reports a higher limit than its gRPC server has.
    with (
        stub_server(LimitedDetector(1 << 30)) as address,
        pytest.raises(
            RefusedError, match=r"Received message larger than max.*--max-message-mb"
        ) as e,
    ):
        detect_one(address, LARGE, retries=0)
    assert e.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_stream_returns_the_preceding_results(address: str, picture: Encode) -> None:
    indices: list[int] = []

    def images() -> Iterator[bytes]:
        yield picture(0)
        yield picture(1)
        yield LARGE
        raise AssertionError("the stream went on after the error")

    with DetectorClient(address) as client:
        with pytest.raises(RefusedError, match="5,242,"):
            indices.extend(index for index, _ in client.stream(images()))
        assert len(client.detect(picture()))
    assert sorted(indices) == [0, 1]

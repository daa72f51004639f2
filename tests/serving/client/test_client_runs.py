"""Runs of `detect_many` in which some requests fail."""

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from many_requests import Run, both_runs
from stub_server import StubDetector, stub_server

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import AccessError, DeadlineError, RefusedError, UnreachableError

Encode = Callable[..., bytes]
RunMany = Callable[..., Run]

_STATUSES = {
    b"dropped": grpc.StatusCode.CANCELLED,
    b"refused": grpc.StatusCode.INTERNAL,
    b"busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    b"other model": grpc.StatusCode.NOT_FOUND,
}


class ScriptedDetector(StubDetector):
    """Stub whose answer to a request depends on the content of its image."""

    def __init__(self) -> None:
        super().__init__()
        # Ends the pending calls for `b"late"`.
        self.release = threading.Event()
        # Count the calls for `b"late"` that were started and ended.
        self.started = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def Detect(self, request: pb.DetectRequest, context: Any) -> pb.DetectResponse:  # noqa: N802
        if request.image == b"late":
            context.add_callback(self.ended.release)
            self.started.release()
            self.release.wait(60)
        if request.image == b"silent":
            context.abort(grpc.StatusCode.UNKNOWN, "")
        if request.image in _STATUSES:
            context.abort(_STATUSES[request.image], "rejected")
        return super().Detect(request, context)


@pytest.fixture
def detector() -> ScriptedDetector:
    return ScriptedDetector()


@pytest.fixture
def scripted(detector: ScriptedDetector) -> Iterator[str]:
    with stub_server(detector) as address:
        yield address
        detector.release.set()


def kinds(outcomes: list[Any]) -> list[type | int]:
    """Return the height of each result, which is its image's size, or the type of the error."""
    return [o.height if isinstance(o, Detections) else type(o) for o in outcomes]


def test_a_status_without_a_message_gets_one(scripted: str) -> None:
    with DetectorClient(scripted) as client, pytest.raises(RefusedError, match="UNKNOWN"):
        client.detect(b"silent")


@both_runs
def test_failed_requests_do_not_affect_the_others(run: RunMany, scripted: str) -> None:
    images = [b"a", b"dropped", b"ccc", b"late", b"refused", b"ffffff"]
    result = run(scripted, images, concurrency=3, retries=0, timeout_s=3)
    assert result.error is None
    assert kinds(result.outcomes) == [1, UnreachableError, 3, DeadlineError, RefusedError, 6]


@both_runs
def test_consecutive_unanswered_requests_end_the_run(run: RunMany, scripted: str) -> None:
    dropped = [b"dropped"] * 2
    images = [*dropped, b"a", *dropped, b"refused", *dropped, b"dropped", b"never sent"]
    result = run(scripted, images, concurrency=3, retries=0)
    lost = [UnreachableError] * 2
    assert kinds(result.outcomes) == [*lost, 1, *lost, RefusedError, *lost]
    assert isinstance(result.error, UnreachableError)
    assert result.error not in result.outcomes


@both_runs
def test_stopped_server_ends_the_run(run: RunMany) -> None:
    with contextlib.ExitStack() as server:
        address = server.enter_context(stub_server(StubDetector()))

        def images() -> Iterator[bytes]:
            yield from [b"x"] * 20
            server.close()
            yield from [b"x"] * 1000

        result = run(address, images(), concurrency=4, retries=0)
    assert isinstance(result.error, UnreachableError)
    assert kinds(result.outcomes)[:16] == [1] * 16
    assert kinds(result.outcomes)[-3:] == [UnreachableError] * 3
    assert len(result.outcomes) <= 23


@both_runs
def test_denied_access_ends_the_run_at_once(run: RunMany) -> None:
    with stub_server(StubDetector(token="s3cret")) as address:
        result = run(address, [b"x"] * 100, concurrency=4)
    assert result.outcomes == []
    assert isinstance(result.error, AccessError)


@both_runs
def test_a_model_that_is_not_served_ends_the_run(run: RunMany, scripted: str) -> None:
    result = run(scripted, [b"a", *[b"other model"] * 100], concurrency=4)
    assert kinds(result.outcomes) == [1]
    assert isinstance(result.error, RefusedError)


@both_runs
def test_unreadable_file_is_one_outcome(
    run: RunMany, address: str, picture: Encode, tmp_path: Path
) -> None:
    (tmp_path / "good.jpg").write_bytes(picture())
    missing = [tmp_path / "missing.jpg"] * 9  # more than the run allows unanswered
    images = [tmp_path / "good.jpg", tmp_path, *missing, picture(1)]
    first, folder, *others, last = run(address, images, concurrency=2).outcomes
    assert len(first)
    assert isinstance(folder, IsADirectoryError)
    assert [type(other) for other in others] == [FileNotFoundError] * 9
    assert len(last)


@both_runs
def test_overloaded_server_does_not_end_the_run(run: RunMany, scripted: str) -> None:
    result = run(scripted, [b"busy"] * 4, concurrency=2, timeout_s=1.0)
    assert kinds(result.outcomes) == [DeadlineError] * 4
    assert result.error is None


@both_runs
def test_silent_server_ends_the_run(run: RunMany) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        result = run(address, [b"x"] * 100, concurrency=2, timeout_s=0.5)
    assert kinds(result.outcomes) == [DeadlineError]
    assert isinstance(result.error, DeadlineError)


@both_runs
def test_error_of_the_images_is_raised_after_the_outcomes(run: RunMany, scripted: str) -> None:
    def images() -> Iterator[bytes]:
        yield from [b"a", b"bb", b"refused", b"dddd"]
        raise LookupError("no more")

    outcomes: list[Any] = []
    with pytest.raises(LookupError, match="no more"):
        run(scripted, images(), concurrency=3, retries=0, into=outcomes)
    assert kinds(outcomes) == [1, 2, RefusedError, 4]


async def test_error_of_async_images_is_raised_after_the_outcomes(scripted: str) -> None:
    async def images() -> AsyncIterator[bytes]:
        for image in (b"a", b"bb"):
            yield image
        raise LookupError("no more")

    async with AsyncDetectorClient(scripted) as client:
        results = client.detect_many(images())
        assert kinds([await anext(results), await anext(results)]) == [1, 2]
        with pytest.raises(LookupError, match="no more"):
            await anext(results)


def test_closing_the_results_cancels_pending_calls(
    detector: ScriptedDetector, scripted: str
) -> None:
    images = (image for image in (b"a", b"late", b"late", b"bb"))
    with DetectorClient(scripted) as client:
        results: Any = client.detect_many(images, concurrency=2)
        assert kinds([next(results)]) == [1]
        assert detector.started.acquire(timeout=60)
        results.close()
        assert detector.ended.acquire(timeout=60)
        assert kinds(list(client.detect_many(images))) == [2]  # `images` is not closed


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_closing_or_cancelling_async_results_cancels_pending_calls(
    detector: ScriptedDetector, scripted: str, how: str
) -> None:
    async with AsyncDetectorClient(scripted) as client:
        results: Any = client.detect_many([b"a", b"late", b"late"], concurrency=2)
        assert kinds([await anext(results)]) == [1]
        assert await asyncio.to_thread(detector.started.acquire, timeout=60)
        if how == "closed":
            await results.aclose()
        else:
            following = asyncio.ensure_future(anext(results))
            assert await asyncio.to_thread(detector.started.acquire, timeout=60)
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following
        assert await asyncio.to_thread(detector.ended.acquire, timeout=60)


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, math.nan, None, True, "8"])
@pytest.mark.parametrize("client", [DetectorClient, AsyncDetectorClient])
async def test_concurrency_must_be_a_positive_integer(client: type[Any], concurrency: Any) -> None:
    with pytest.raises(ValueError, match=f"concurrency is {concurrency!r}"):
        client("localhost:1").detect_many([b"x"], concurrency=concurrency)

"""Clients that ask for many images, some of which get no answer."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from many_requests import Run, both_runs
from stub_server import Detector, serving

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import (
    AccessError,
    DeadlineError,
    RefusedError,
    UnreachableError,
)

Encode = Callable[..., bytes]
RunMany = Callable[..., Run]

_STATUSES = {
    b"dropped": grpc.StatusCode.CANCELLED,
    b"refused": grpc.StatusCode.INTERNAL,
    b"busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Moody(Detector):
    """Does what images tell it to."""

    def __init__(self) -> None:
        super().__init__()
        self.going_on = threading.Event()
        self.late = threading.Semaphore(0)
        """Has one for each late one that has come."""
        self.ended = threading.Semaphore(0)
        """Has one for each late one that has ended."""

    def Detect(self, request: pb.DetectRequest, context: Any) -> pb.DetectResponse:  # noqa: N802
        if request.image == b"late":
            context.add_callback(self.ended.release)
            self.late.release()
            self.going_on.wait(60)
        if request.image in _STATUSES:
            context.abort(_STATUSES[request.image], "not this one")
        return super().Detect(request, context)


@pytest.fixture
def detector() -> Moody:
    return Moody()


@pytest.fixture
def moody(detector: Moody) -> Iterator[str]:
    with serving(detector) as address:
        yield address
        detector.going_on.set()


def kinds(outcomes: list[Any]) -> list[type | int]:
    """The heights of what was found, which are the sizes of the images, and the kinds of errors."""
    return [o.height if isinstance(o, Detections) else type(o) for o in outcomes]


@both_runs
def test_what_gets_no_answer_leaves_the_others_theirs(run: RunMany, moody: str) -> None:
    images = [b"a", b"dropped", b"ccc", b"late", b"refused", b"ffffff"]
    found = run(moody, images, concurrency=3, retries=0, timeout_s=3)
    assert found.end is None
    assert kinds(found.outcomes) == [1, UnreachableError, 3, DeadlineError, RefusedError, 6]


@both_runs
def test_as_many_without_an_answer_as_are_in_flight_end_the_run(run: RunMany, moody: str) -> None:
    dropped = [b"dropped"] * 2
    images = [*dropped, b"a", *dropped, b"refused", *dropped, b"dropped", b"never told"]
    found = run(moody, images, concurrency=3, retries=0)
    lost = [UnreachableError] * 2
    assert kinds(found.outcomes) == [*lost, 1, *lost, RefusedError, *lost]
    assert isinstance(found.end, UnreachableError)
    assert found.end not in found.outcomes


@both_runs
def test_server_that_goes_ends_the_run(run: RunMany) -> None:
    with contextlib.ExitStack() as server:
        address = server.enter_context(serving(Detector()))

        def images() -> Iterator[bytes]:
            yield from [b"x"] * 20
            server.close()
            yield from [b"x"] * 1000

        found = run(address, images(), concurrency=4, retries=0)
    assert isinstance(found.end, UnreachableError)
    assert kinds(found.outcomes)[:16] == [1] * 16
    assert kinds(found.outcomes)[-3:] == [UnreachableError] * 3
    assert len(found.outcomes) <= 23


@both_runs
def test_without_access_there_is_no_second_image(run: RunMany) -> None:
    with serving(Detector(token="s3cret")) as address:
        found = run(address, [b"x"] * 100, concurrency=4)
    assert found.outcomes == []
    assert isinstance(found.end, AccessError)


@both_runs
def test_file_that_cannot_be_read_is_one_outcome(
    run: RunMany, address: str, picture: Encode, tmp_path: Path
) -> None:
    (tmp_path / "good.jpg").write_bytes(picture())
    missing = [tmp_path / "missing.jpg"] * 9  # as if it were the server that is silent
    images = [tmp_path / "good.jpg", tmp_path, *missing, picture(1)]
    first, folder, *others, last = run(address, images, concurrency=2).outcomes
    assert len(first)
    assert isinstance(folder, IsADirectoryError)
    assert [type(other) for other in others] == [FileNotFoundError] * 9
    assert len(last)


@both_runs
def test_server_that_is_there_but_busy_does_not_end_the_run(run: RunMany, moody: str) -> None:
    found = run(moody, [b"busy"] * 4, concurrency=2, timeout_s=1.0)
    assert kinds(found.outcomes) == [DeadlineError] * 4
    assert found.end is None


@both_runs
def test_server_that_swallows_what_it_gets_ends_the_run(run: RunMany) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        found = run(address, [b"x"] * 100, concurrency=2, timeout_s=0.5)
    assert kinds(found.outcomes) == [DeadlineError]
    assert isinstance(found.end, DeadlineError)


@both_runs
def test_images_that_end_with_an_error_leave_those_before_theirs(run: RunMany, moody: str) -> None:
    def images() -> Iterator[bytes]:
        yield from [b"a", b"bb", b"refused", b"dddd"]
        raise LookupError("no more")

    outcomes: list[Any] = []
    with pytest.raises(LookupError, match="no more"):
        run(moody, images(), concurrency=3, retries=0, into=outcomes)
    assert kinds(outcomes) == [1, 2, RefusedError, 4]


def test_images_that_end_with_an_error_may_come_asynchronously(moody: str) -> None:
    async def images() -> AsyncIterator[bytes]:
        for image in (b"a", b"bb"):
            yield image
        raise LookupError("no more")

    outcomes: list[Any] = []

    async def ask() -> None:
        async with AsyncDetectorClient(moody) as client:
            async for outcome in client.detect_many(images()):
                outcomes.append(outcome)  # noqa: PERF401  # for what came before the error

    with pytest.raises(LookupError, match="no more"):
        asyncio.run(ask())
    assert kinds(outcomes) == [1, 2]


def test_results_that_nobody_wants_are_cancelled(detector: Moody, moody: str) -> None:
    images = (image for image in (b"a", b"late", b"late", b"bb"))
    with DetectorClient(moody) as client:
        results: Any = client.detect_many(images, concurrency=2)
        assert kinds([next(results)]) == [1]
        assert detector.late.acquire(timeout=60)
        results.close()
        assert detector.ended.acquire(timeout=60)
        assert kinds(list(client.detect_many(images))) == [2]  # which were not closed


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_results_that_no_task_wants_are_cancelled(detector: Moody, moody: str, how: str) -> None:
    async def ask() -> None:
        async with AsyncDetectorClient(moody) as client:
            results: Any = client.detect_many([b"a", b"late", b"late"], concurrency=2)
            assert kinds([await anext(results)]) == [1]
            assert await asyncio.to_thread(detector.late.acquire, timeout=60)
            if how == "closed":
                await results.aclose()
            else:
                following = asyncio.ensure_future(anext(results))
                assert await asyncio.to_thread(detector.late.acquire, timeout=60)
                following.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await following
            assert await asyncio.to_thread(detector.ended.acquire, timeout=60)

    asyncio.run(ask())


@pytest.mark.parametrize("concurrency", [0, -1])
@pytest.mark.parametrize("client", [DetectorClient, AsyncDetectorClient])
def test_requests_in_flight_are_one_or_more(client: type[Any], concurrency: int) -> None:
    async def ask() -> None:
        with pytest.raises(ValueError, match=f"concurrency is {concurrency}; give 1 or more"):
            client("localhost:1").detect_many([b"x"], concurrency=concurrency)

    asyncio.run(ask())

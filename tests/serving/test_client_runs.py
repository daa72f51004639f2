"""Clients that ask for many images, some of which get no answer."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from many_requests import Run, both_runs
from stub_server import Detector, serving

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import (
    AccessError,
    DeadlineError,
    RefusedError,
    UnreachableError,
)

Encode = Callable[..., bytes]
RunMany = Callable[..., Run]

_STATUSES = {b"dropped": grpc.StatusCode.CANCELLED, b"refused": grpc.StatusCode.INTERNAL}


class Moody(Detector):
    """Does what images tell it to."""

    def __init__(self) -> None:
        super().__init__()
        self.going_on = threading.Event()

    def Detect(self, request: pb.DetectRequest, context: Any) -> pb.DetectResponse:  # noqa: N802
        if request.image == b"late":
            self.going_on.wait(60)
        if request.image in _STATUSES:
            context.abort(_STATUSES[request.image], "not this one")
        return super().Detect(request, context)


@pytest.fixture
def moody() -> Iterator[str]:
    detector = Moody()
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

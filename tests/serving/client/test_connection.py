"""Clients before a server that is busy or away, and what they tell it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from stub_server import IMAGE, Detector, both_ways, serving

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.client_command import client
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import (
    DeadlineError,
    RefusedError,
    UnreachableError,
)
from maskrcnn_trt.serving.scheduling import RequestTerms

BUSY, AWAY = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


@both_ways
def test_busy_server_is_asked_again(ask: Callable[..., Detections]) -> None:
    detector = Detector([BUSY, AWAY, BUSY])
    with serving(detector) as address:
        assert ask(address).height == len(IMAGE)
    assert detector.calls == 4


@both_ways
def test_tries_are_counted(ask: Callable[..., Detections]) -> None:
    detector = Detector([BUSY] * 9)
    with serving(detector) as address:
        for retries in (0, 2):
            detector.calls = 0
            with pytest.raises(RefusedError, match="not now") as caught:
                ask(address, retries=retries)
            assert caught.value.code is BUSY
            assert detector.calls == 1 + retries
    with pytest.raises(ValueError, match="retries is 5; gRPC retries 0 to 4 times"):
        ask("localhost:1", retries=5)


@both_ways
def test_fault_of_the_request_is_not_sent_again(ask: Callable[..., Detections]) -> None:
    detector = Detector([grpc.StatusCode.INVALID_ARGUMENT])
    with serving(detector) as address, pytest.raises(RefusedError):
        ask(address)
    assert detector.calls == 1


@both_ways
def test_deadline_is_over_all_tries(ask: Callable[..., Detections]) -> None:
    detector = Detector([AWAY] * 9)
    late = r"no result came from localhost:\d+ within 1 s; the server is too busy, or not there: "
    with serving(detector) as address, pytest.raises(DeadlineError, match=late):
        ask(address, timeout_s=1.0)
    assert 1 < detector.calls < 5


@both_ways
def test_no_server_is_told_from_one_that_gives_up(ask: Callable[..., Detections]) -> None:
    with pytest.raises(DeadlineError, match=r"no result came .* timeout_s, or start one with"):
        ask("localhost:1", timeout_s=0.5)
    gives_up = Detector([grpc.StatusCode.DEADLINE_EXCEEDED])
    with serving(gives_up) as address, pytest.raises(RefusedError, match="not now") as caught:
        ask(address)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_terms_reach_the_server(tmp_path: Path) -> None:
    terms = RequestTerms(precision="fp16", priority=1, timeout_s=0.25)
    expected = pb.DetectRequest(precision="fp16", priority=1, timeout_us=250_000)
    fields = "precision", "priority", "timeout_us"

    def check(detector: Detector) -> None:
        asked, detector.asked = detector.asked, None
        assert [getattr(asked, f) for f in fields] == [getattr(expected, f) for f in fields]

    async def ask(address: str) -> None:
        async with AsyncDetectorClient(address) as client:
            await client.detect(IMAGE, terms=terms)
            check(detector)
            assert [found async for found in client.detect_many([IMAGE], terms=terms)]
            check(detector)
            assert [found async for found in client.stream([IMAGE], terms=terms)]
            check(detector)

    detector = Detector()
    with serving(detector) as address:
        asyncio.run(ask(address))
        with DetectorClient(address) as sync:
            sync.detect(IMAGE, terms=terms)
            check(detector)
            assert list(sync.detect_many([IMAGE], terms=terms))
            check(detector)
            assert list(sync.stream([IMAGE], terms=terms))
            check(detector)
        image, output = tmp_path / "a.jpg", str(tmp_path / "found")
        image.write_bytes(IMAGE)
        words = [address, str(image), "-o", output, "--format", "coco", "--precision", "fp16"]
        words += ["--priority", "1", "--server-timeout", "0.25"]
        result = CliRunner().invoke(client, words)
        assert result.exit_code == 0, result.output
        check(detector)


@pytest.mark.parametrize("value", ["nan", "inf", "1e30", "0"])
@pytest.mark.parametrize("option", ["--timeout", "--server-timeout"])
def test_times_that_nobody_can_wait_are_refused(tmp_path: Path, option: str, value: str) -> None:
    image = tmp_path / "a.jpg"
    image.write_bytes(IMAGE)
    result = CliRunner().invoke(client, ["localhost:1", str(image), option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr


def test_refusals_of_some_images_leave_the_others() -> None:
    images = [b"a", b"bb", b"ccc", b"dddd"]
    with serving(Detector([BUSY])) as address, DetectorClient(address, retries=0) as detector:
        outcomes = list(detector.detect_many(images, concurrency=1))
    assert isinstance(outcomes[0], RefusedError)
    assert [outcome.height for outcome in outcomes[1:]] == [2, 3, 4]


@both_ways
def test_requests_go_to_a_server_that_answers(ask: Callable[..., Detections]) -> None:
    with serving(Detector()) as address, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        ports = unused.getsockname()[1], address.rpartition(":")[2]
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        assert ask(target).height == len(IMAGE)


def test_stream_survives_refusals_and_ends_with_what_cannot_be_read(tmp_path: Path) -> None:
    images = [b"a", b"bb", b"ccc", tmp_path / "missing.jpg", b"never sent"]
    found: list[tuple[int, Any]] = []
    with (
        serving(Detector([BUSY])) as address,
        DetectorClient(address) as detector,
        pytest.raises(FileNotFoundError),
    ):
        found.extend(detector.stream(images))
    assert [place for place, _ in found] == [0, 1, 2]
    assert isinstance(found[0][1], RefusedError)
    assert [outcome.height for _, outcome in found[1:]] == [2, 3]


def test_async_client_takes_images_as_they_come(tmp_path: Path) -> None:
    async def frames() -> AsyncIterator[bytes | Path]:
        for size in (1, 2, 3):
            await asyncio.sleep(0.01)
            yield b"x" * size
        yield tmp_path / "missing.jpg"

    places = []

    async def stream(detector: AsyncDetectorClient) -> None:
        async for place, _ in detector.stream(frames()):
            places.append(place)

    async def ask(address: str) -> None:
        async with AsyncDetectorClient(address) as detector:
            many = [found async for found in detector.detect_many(frames(), concurrency=1)]
            assert [type(found) for found in many] == [Detections] * 3 + [FileNotFoundError]
            with pytest.raises(FileNotFoundError):
                await stream(detector)
            assert places == [0, 1, 2]

    with serving(Detector()) as address:
        asyncio.run(ask(address))


@both_ways
def test_name_that_nobody_has_is_told(ask: Callable[..., Detections]) -> None:
    with pytest.raises(UnreachableError, match=r"no server answers at no\.such\.host:1"):
        ask("no.such.host:1")

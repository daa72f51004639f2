"""Retries and deadlines of clients, and the fields of their requests."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from click.testing import CliRunner
from stub_server import IMAGE, StubDetector, both_clients, stub_server

from maskrcnn_trt.serving.client import AsyncDetectorClient, Credentials, DetectorClient
from maskrcnn_trt.serving.commands.client import client
from maskrcnn_trt.serving.detections import Detections, SchedulingOptions
from maskrcnn_trt.serving.errors import DeadlineError, RefusedError, UnreachableError

OVERLOADED, UNAVAILABLE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


@both_clients
def test_retries_of_overloaded_servers(detect: Callable[..., Detections]) -> None:
    detector = StubDetector([OVERLOADED, UNAVAILABLE, OVERLOADED])
    with stub_server(detector) as address:
        assert detect(address).height == len(IMAGE)
        assert detector.calls == 4
        for retries in (0, 2):
            detector.calls, detector.errors = 0, [OVERLOADED] * 9
            with pytest.raises(RefusedError, match="not now") as caught:
                detect(address, retries=retries)
            assert caught.value.code is OVERLOADED
            assert detector.calls == 1 + retries
        detector.calls, detector.errors = 0, [grpc.StatusCode.INVALID_ARGUMENT]
        with pytest.raises(RefusedError):
            detect(address)
        assert detector.calls == 1
    for retries in (5, 1.5, "2"):
        with pytest.raises(ValueError, match=rf"retries is {retries!r}.* 0 to 4"):
            detect("localhost:1", retries=retries)


@both_clients
def test_deadline_includes_all_retries(detect: Callable[..., Detections]) -> None:
    detector = StubDetector([UNAVAILABLE] * 9)
    late = r"127\.0\.0\.1:\d+ within 1 s.*--timeout"
    with stub_server(detector) as address, pytest.raises(DeadlineError, match=late):
        detect(address, timeout_s=1.0)
    assert 1 < detector.calls < 5


@both_clients
def test_missing_server_is_distinguished_from_an_expired_request(
    detect: Callable[..., Detections],
) -> None:
    with pytest.raises(DeadlineError, match=r"timeout_s.*maskrcnn serve"):
        detect("localhost:1", timeout_s=0.5)
    expired = StubDetector([grpc.StatusCode.DEADLINE_EXCEEDED])
    with stub_server(expired) as address, pytest.raises(RefusedError, match="not now") as caught:
        detect(address)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


@both_clients
def test_host_name_has_other_addresses_than_the_reported_one(
    detect: Callable[..., Detections],
) -> None:
    for host, is_named in (("localhost", True), ("127.0.0.1", False)):
        with pytest.raises(UnreachableError) as caught:
            detect(f"{host}:1", retries=0)
        message = str(caught.value)
        for remedy in ("the port", "HTTP", "--tls", "--certificate", "IP address"):
            assert (remedy in message) == is_named, message


async def test_scheduling_options_reach_the_server(tmp_path: Path) -> None:
    scheduling = SchedulingOptions(precision="fp16", priority=1, timeout_s=0.25)
    detector = StubDetector()

    def check() -> None:
        sent, detector.last_request = detector.last_request, None
        assert sent is not None
        assert (sent.precision, sent.priority, sent.timeout_us) == ("fp16", 1, 250_000)

    with stub_server(detector) as address:
        async with AsyncDetectorClient(address) as other:
            await other.detect(IMAGE, scheduling=scheduling)
            check()
            for many in (other.detect_many, other.stream):
                assert [result async for result in many([IMAGE], scheduling=scheduling)]
                check()
        with DetectorClient(address) as sync:
            sync.detect(IMAGE, scheduling=scheduling)
            check()
            for call in (sync.detect_many, sync.stream):
                assert list(call([IMAGE], scheduling=scheduling))
                check()
        image, output = tmp_path / "a.jpg", str(tmp_path / "detections")
        image.write_bytes(IMAGE)
        words = [address, str(image), "-o", output, "--format", "coco", "--precision", "fp16"]
        words += ["--priority", "1", "--server-timeout", "0.25"]
        result = CliRunner().invoke(client, words)
        assert result.exit_code == 0, result.output
        check()


@pytest.mark.parametrize("value", ["nan", "inf", "1e30", "0"])
@pytest.mark.parametrize("option", ["--timeout", "--server-timeout"])
def test_timeouts_must_be_finite_and_positive(tmp_path: Path, option: str, value: str) -> None:
    image = tmp_path / "a.jpg"
    image.write_bytes(IMAGE)
    result = CliRunner().invoke(client, ["localhost:1", str(image), option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr


@both_clients
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_timeout_of_a_client_must_be_finite_and_positive(
    detect: Callable[..., Detections], value: float
) -> None:
    with pytest.raises(ValueError, match=f"timeout_s is {value}"):
        detect("localhost:1", timeout_s=value)


@both_clients
def test_requests_go_to_a_reachable_address(detect: Callable[..., Detections]) -> None:
    with stub_server(StubDetector()) as address, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        ports = unused.getsockname()[1], address.rpartition(":")[2]
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        assert detect(target).height == len(IMAGE)


def test_stream_survives_rejections_and_ends_at_an_unreadable_file(tmp_path: Path) -> None:
    images = [b"a", b"bb", b"ccc", tmp_path / "missing.jpg", b"never sent"]
    results: list[tuple[int, Any]] = []
    with (
        stub_server(StubDetector([OVERLOADED])) as address,
        DetectorClient(address) as detector,
        pytest.raises(FileNotFoundError),
    ):
        results.extend(detector.stream(images))
    assert [index for index, _ in results] == [0, 1, 2]
    assert isinstance(results[0][1], RefusedError)
    assert [outcome.height for _, outcome in results[1:]] == [2, 3]


async def test_async_client_accepts_async_images(tmp_path: Path) -> None:
    async def frames() -> AsyncIterator[bytes | Path]:
        for size in (1, 2, 3):
            await asyncio.sleep(0.01)
            yield b"x" * size
        yield tmp_path / "missing.jpg"

    indices = []

    async def stream(detector: AsyncDetectorClient) -> None:
        async for index, _ in detector.stream(frames()):
            indices.append(index)

    with stub_server(StubDetector()) as address:
        async with AsyncDetectorClient(address) as detector:
            many = [result async for result in detector.detect_many(frames(), concurrency=1)]
            assert [type(result) for result in many] == [Detections] * 3 + [FileNotFoundError]
            with pytest.raises(FileNotFoundError):
                await stream(detector)
            assert indices == [0, 1, 2]


@both_clients
@pytest.mark.parametrize("tls", [False, True])
def test_other_protocols_are_reported(detect: Callable[..., Detections], tls: bool) -> None:
    authority = trustme.CA()
    credentials = Credentials(root_certificate=authority.cert_pem.bytes()) if tls else None
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("127.0.0.1").configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever).start()
        with pytest.raises(UnreachableError, match=r"does not speak gRPC .*port of gRPC"):
            detect(f"127.0.0.1:{server.server_port}", retries=0, credentials=credentials)
        server.shutdown()


@both_clients
def test_unknown_host_name_is_reported(detect: Callable[..., Detections]) -> None:
    with pytest.raises(UnreachableError, match=r"no\.such\.host:1"):
        detect("no.such.host:1")

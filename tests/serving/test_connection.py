"""Clients before a server that is busy, away, or asks who they are."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import trustme
from click.testing import CliRunner

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import (
    DetectorServicer,
    add_DetectorServicer_to_server,
)
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.connection import Credentials
from maskrcnn_trt.serving.detection_commands import client
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import (
    AccessError,
    DeadlineError,
    RefusedError,
    UnreachableError,
)
from maskrcnn_trt.serving.scheduling import RequestTerms

IMAGE = b"an image" * 100_000
BUSY, AWAY = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


@dataclass
class Detector(DetectorServicer):  # type: ignore[misc]  # generated, it has no types
    """Refuses as often as it is told to, then finds nothing in an image as high as it has bytes."""

    refusals: list[grpc.StatusCode] = field(default_factory=list)
    token: str | None = None
    calls: int = 0
    asked: pb.DetectRequest | None = None

    def Detect(self, request: pb.DetectRequest, context: Any) -> pb.DetectResponse:  # noqa: N802
        self.calls += 1
        self.asked = request
        sent = dict(context.invocation_metadata()).get("authorization")
        if self.token is not None and sent != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")
        if self.refusals:
            context.abort(self.refusals.pop(0), "not now")
        return pb.DetectResponse(height=len(request.image))

    def DetectStream(  # noqa: N802
        self, requests: Iterator[pb.DetectRequest], context: Any
    ) -> Iterator[pb.DetectStreamResponse]:
        for request in requests:
            self.calls += 1
            self.asked = request
            response = pb.DetectResponse(height=len(request.image))
            if self.refusals:
                refusal = pb.Error(code=self.refusals.pop(0).value[0], message="not now")
                yield pb.DetectStreamResponse(id=request.id, error=refusal)
            else:
                yield pb.DetectStreamResponse(id=request.id, response=response)


@contextlib.contextmanager
def serving(detector: Detector, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    server = grpc.server(
        ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 2 * len(IMAGE))]
    )
    add_DetectorServicer_to_server(detector, server)
    if credentials is None:
        port = server.add_insecure_port("localhost:0")
    else:
        port = server.add_secure_port("localhost:0", credentials)
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        server.stop(None).wait()


def detect(address: str, **options: Any) -> Detections:
    with DetectorClient(address, **options) as detector:
        return detector.detect(IMAGE)


def detect_async(address: str, **options: Any) -> Detections:
    async def ask() -> Detections:
        async with AsyncDetectorClient(address, **options) as detector:
            return await detector.detect(IMAGE)

    return asyncio.run(ask())


@pytest.fixture(params=[detect, detect_async])
def ask(request: pytest.FixtureRequest) -> Callable[..., Detections]:
    return request.param  # type: ignore[no-any-return]


def test_busy_server_is_asked_again(ask: Callable[..., Detections]) -> None:
    detector = Detector([BUSY, AWAY, BUSY])
    with serving(detector) as address:
        assert ask(address).height == len(IMAGE)
    assert detector.calls == 4


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


def test_fault_of_the_request_is_not_sent_again(ask: Callable[..., Detections]) -> None:
    detector = Detector([grpc.StatusCode.INVALID_ARGUMENT])
    with serving(detector) as address, pytest.raises(RefusedError):
        ask(address)
    assert detector.calls == 1


def test_deadline_is_over_all_tries(ask: Callable[..., Detections]) -> None:
    detector = Detector([AWAY] * 9)
    with serving(detector) as address, pytest.raises(DeadlineError, match="no server answered"):
        ask(address, timeout_s=0.3)
    assert 1 < detector.calls < 5


def test_no_server_is_told_from_one_that_gives_up(ask: Callable[..., Detections]) -> None:
    with pytest.raises(DeadlineError, match=r"no server answered at .*; start one with"):
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


def test_refusals_of_some_images_leave_the_others() -> None:
    images = [b"a", b"bb", b"ccc", b"dddd"]
    with serving(Detector([BUSY])) as address, DetectorClient(address, retries=0) as detector:
        outcomes = list(detector.detect_many(images, concurrency=1))
    assert isinstance(outcomes[0], RefusedError)
    assert [outcome.height for outcome in outcomes[1:]] == [2, 3, 4]


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

    async def count(outcomes: AsyncIterator[Any]) -> int:
        found = 0
        try:
            async for _ in outcomes:
                found += 1
        except FileNotFoundError:
            return found
        raise AssertionError("the missing file went unnoticed")

    async def ask(address: str) -> None:
        async with AsyncDetectorClient(address) as detector:
            assert await count(detector.detect_many(frames(), concurrency=1)) == 3
            assert await count(detector.stream(frames())) == 3

    with serving(Detector()) as address:
        asyncio.run(ask(address))


class Identity(NamedTuple):
    """Someone's certificate and key, PEM."""

    certificate: bytes
    key: bytes


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def identity(authority: trustme.CA, name: str) -> Identity:
    issued = authority.issue_cert(name)
    return Identity(issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes())


def server_credentials(authority: trustme.CA, **options: Any) -> grpc.ServerCredentials:
    certificate, key = identity(authority, "localhost")
    return grpc.ssl_server_credentials([(key, certificate)], **options)


def test_tls_carries_the_token(authority: trustme.CA, ask: Callable[..., Detections]) -> None:
    root = authority.cert_pem.bytes()
    with serving(Detector(token="s3cret"), server_credentials(authority)) as address:
        shown = Credentials(root_certificate=root, token="s3cret")
        assert ask(address, credentials=shown).height == len(IMAGE)
        for token in (None, "wrong"):
            with pytest.raises(AccessError, match=r"the token is wrong.*--token-file"):
                ask(address, credentials=Credentials(root_certificate=root, token=token))


def test_server_that_knows_its_clients(
    authority: trustme.CA, ask: Callable[..., Detections]
) -> None:
    root = authority.cert_pem.bytes()
    mutual = server_credentials(authority, root_certificates=root, require_client_auth=True)
    with serving(Detector(), mutual) as address:
        certificate, key = identity(authority, "client")
        shown = Credentials(root_certificate=root, certificate=certificate, key=key)
        assert ask(address, credentials=shown).height == len(IMAGE)
        with pytest.raises(UnreachableError, match=r"a certificate of yours \(--certificate\)"):
            ask(address, credentials=Credentials(root_certificate=root), retries=0)
    with pytest.raises(ValueError, match="go together"):
        Credentials(key=key)


def test_command_shows_its_credentials(authority: trustme.CA, tmp_path: Path) -> None:
    image, token, root = tmp_path / "a.jpg", tmp_path / "token", tmp_path / "root.pem"
    image.write_bytes(IMAGE)
    token.write_text("s3cret\n")
    root.write_bytes(authority.cert_pem.bytes())
    output = tmp_path / "found"
    with serving(Detector(token="s3cret"), server_credentials(authority)) as address:
        words = [address, str(image), "-o", str(output), "--format", "coco"]
        trust = ["--root-certificate", str(root)]
        accepted = CliRunner().invoke(client, [*words, *trust, "--token-file", str(token)])
        refused = CliRunner().invoke(client, [*words, *trust])
    assert accepted.exit_code == 0, accepted.output
    assert [path.name for path in output.iterdir()] == ["detections.json"]
    assert isinstance(refused.exception, AccessError)
    half = CliRunner().invoke(client, [*words, "--certificate", str(root)])
    assert "--certificate and --key go together" in half.stderr


def test_faults_of_tls_are_named(authority: trustme.CA, ask: Callable[..., Detections]) -> None:
    stranger = Credentials(root_certificate=trustme.CA().cert_pem.bytes())
    friend = Credentials(root_certificate=authority.cert_pem.bytes())
    with serving(Detector(), server_credentials(authority)) as address:
        with pytest.raises(UnreachableError, match=r"not to be trusted.*--root-certificate"):
            ask(address, credentials=stranger, retries=0)
        by_number = address.replace("localhost", "127.0.0.1")
        with pytest.raises(UnreachableError, match="not to be trusted"):
            ask(by_number, credentials=friend, retries=0)
        with pytest.raises(UnreachableError, match=r"asks for TLS \(--tls\)"):
            ask(address, retries=0)
        with pytest.raises(UnreachableError, match="not usable; give --root-certificate"):
            ask(address, retries=0, credentials=Credentials(root_certificate=b"no certificate"))
    with (
        serving(Detector()) as address,
        pytest.raises(UnreachableError, match="does not speak TLS"),
    ):
        ask(address, credentials=friend, retries=0)


def test_name_that_nobody_has_is_told(ask: Callable[..., Detections]) -> None:
    with pytest.raises(UnreachableError, match=r"no server answers at no\.such\.host:1"):
        ask("no.such.host:1")

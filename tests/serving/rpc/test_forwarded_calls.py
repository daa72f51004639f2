"""Calls through front ends have the same results as calls without."""

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import raw_http2 as http2
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from in_process_server import OWN_CONNECTION, served_in_thread
from raw_http2 import DETECT, DETECT_STREAM
from server_load import front_end_pids, wait_until

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import Credentials, DetectorClient
from maskrcnn_trt.serving.errors import UnreachableError
from maskrcnn_trt.serving.messages import REQUEST_ID_KEY

Encode = Callable[..., bytes]

HEALTH = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
READY = "/inference.GRPCInferenceService/ServerReady"
SHARED_MEMORY = "/inference.GRPCInferenceService/SystemSharedMemoryStatus"
METADATA = ((REQUEST_ID_KEY, "chosen"), ("data-bin", b"\0\xff"))


@pytest.fixture(scope="module")
def addresses(wide_bundle: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a server without front ends and of one with two."""
    settings = {"max_message_mb": 1, "max_wait_s": 600}
    with (
        served_in_thread(wide_bundle, front_ends=0, **settings) as plain,
        served_in_thread(wide_bundle, front_ends=2, **settings) as forwarded,
    ):
        yield plain, forwarded


@contextlib.asynccontextmanager
async def opened(address: str, method: str) -> AsyncIterator[Any]:
    """Call a method with raw messages."""
    async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        yield channel.stream_stream(method)(timeout=60, metadata=METADATA)


def outcome(address: str, method: str, *messages: bytes) -> Any:
    """Return the responses, status, message and trailing metadata of a call."""
    # Not with grpc.aio: its clients report an error of their own if a call ends while they send.
    responses = []
    with grpc.insecure_channel(address, OWN_CONNECTION) as channel:
        call = channel.stream_stream(method)(iter(messages), timeout=60, metadata=METADATA)
        with contextlib.suppress(grpc.RpcError):
            responses.extend(call)  # also those before an error
        return responses, call.code(), call.details(), dict(call.trailing_metadata())


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        ("/maskrcnn.v1.Detector/GetModel", [b""]),
        ("/maskrcnn.v1.Detector/GetModel", [pb.GetModelRequest(model="?").SerializeToString()]),
        (DETECT, [pb.DetectRequest(image=b"no image").SerializeToString()]),
        (DETECT, [b"no message"]),
        (DETECT, []),
        (DETECT, [bytes(2 << 20)]),
        (DETECT_STREAM, []),
        (DETECT_STREAM, [pb.DetectRequest(id="1", image=b"no image").SerializeToString()] * 2),
        (DETECT_STREAM, [b"no message"]),
        ("/maskrcnn.v1.Detector/Unknown", [b""]),
        ("/unknown.Service/Unknown", []),
        (HEALTH, [b""]),
        (HEALTH, [HealthCheckRequest(service="?").SerializeToString()]),
        (REFLECTION, [ServerReflectionRequest(list_services="").SerializeToString()]),
        (READY, [b""]),
        (SHARED_MEMORY, [b""]),
        ("/inference.GRPCInferenceService/RepositoryModelUnload", [b""]),
    ],
)
def test_responses_status_and_metadata_are_equal(
    addresses: tuple[str, str], method: str, messages: list[bytes]
) -> None:
    plain, forwarded = (outcome(address, method, *messages) for address in addresses)
    assert forwarded == plain


def test_detections_and_request_ids_are_equal(addresses: tuple[str, str], picture: Encode) -> None:
    requests = [pb.DetectRequest(id=str(i), image=picture(i)).SerializeToString() for i in range(8)]
    found = []
    for address in addresses:
        unary = outcome(address, DETECT, requests[0])
        assert unary[1:3] == (grpc.StatusCode.OK, "")
        assert unary[3][REQUEST_ID_KEY] == "chosen"
        streamed = outcome(address, DETECT_STREAM, *requests)
        single = [pb.DetectResponse.FromString(response) for response in unary[0]]
        several = sorted(
            (pb.DetectStreamResponse.FromString(response) for response in streamed[0]),
            key=lambda response: response.id,
        )
        assert [response.id for response in several] == [str(index) for index in range(8)]
        detections = [[*response.detections] for response in single]
        found.append(detections + [[*response.response.detections] for response in several])
    assert found[0] == found[1]
    assert all(found[0])


@pytest.mark.parametrize("front_ends", [0, 1])
def test_a_path_that_is_not_text_ends_no_server(
    addresses: tuple[str, str], front_ends: int
) -> None:
    address = addresses[front_ends]
    with http2.connect(address) as connection:
        connection.sendall(http2.call(1, metadata={":path": b"/\xff"}))
        for _ in range(5):
            time.sleep(0.1)
            assert outcome(address, READY, b"")[1] is grpc.StatusCode.OK


async def test_messages_of_a_stream_alternate(addresses: tuple[str, str], picture: Encode) -> None:
    async with opened(addresses[1], DETECT_STREAM) as call:
        for index in range(5):
            request = pb.DetectRequest(id=str(index), image=picture(index))
            await call.write(request.SerializeToString())
            response = pb.DetectStreamResponse.FromString(await call.read())
            assert response.id == str(index)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_watch_lasts_until_the_client_cancels_it(addresses: tuple[str, str]) -> None:
    async with opened(addresses[1], WATCH) as call:
        await call.write(b"")
        assert await call.read()
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED


def test_tls_with_a_renewed_certificate_and_a_restarted_front_end(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    files = {"tls_certificate": tmp_path / "certificate", "tls_key": tmp_path / "key"}

    def renew() -> Credentials:
        authority = trustme.CA()
        issued = authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(files["tls_certificate"])
        issued.private_key_pem.write_to_path(files["tls_key"])
        return Credentials(root_certificate=authority.cert_pem.bytes())

    def connects(credentials: Credentials) -> bool:
        with (
            contextlib.suppress(UnreachableError),
            DetectorClient(address, retries=0, credentials=credentials) as client,
        ):
            return len(client.detect(picture())) > 0
        return False

    credentials, others = renew(), front_end_pids(os.getpid())
    settings = {"host": "localhost", "front_ends": 2, **files}
    with served_in_thread(wide_bundle, **settings) as address:
        assert connects(credentials)
        credentials = renew()
        wait_until(lambda: connects(credentials))
        # A new front end gets the content that the server has loaded.
        files["tls_key"].write_text("no key")
        for pid in front_end_pids(os.getpid()) - others:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: connects(credentials))

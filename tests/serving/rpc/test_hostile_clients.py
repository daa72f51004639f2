"""Attacks on one server process, from each of which it must recover."""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import raw_http2 as http2
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest
from server_load import memory_of, server_process, wait_until
from triton_requests import MODEL

from maskrcnn_trt.protos.inference import open_inference_pb2
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.client import DetectorClient

Encode = Callable[..., bytes]
INFER_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
# Allowed growth of the server's memory.
_SPARE_BYTES = 150 << 20
# Number of files that may stay open: gRPC does not read from a client with unsent responses.
_SPARE_FILES = 15
# Number of calls per connection whose responses are not read.
_CALLS = 20
# Number of health calls per connection.
_HEALTH_CALLS = 900
# Size of a burst of calls that the server accepts completely.
_AT_ONCE = 200


class Server(NamedTuple):
    """Server process under attack."""

    pid: int
    address: str
    log: Path

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def assert_serving(self, image: bytes) -> None:
        """Check that a new client with the default retries gets detections."""
        with DetectorClient(self.address, timeout_s=60) as client:
            found = client.detect(image)
        assert (found.height, found.width) == (120, 200)
        assert len(found)
        assert found.rles


@pytest.fixture(scope="module")
def server(wide_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("hostile") / "log"
    with server_process(wide_bundle, log, "--max-delay-ms", "0") as (process, address):
        yield Server(process.pid, address, log)


@contextmanager
def thousand_connections(address: str, image: bytes) -> Iterator[None]:
    options = [("grpc.use_local_subchannel_pool", 1)]  # separate connections
    with ExitStack() as connections:
        channels = [
            connections.enter_context(grpc.insecure_channel(address, options)) for _ in range(1000)
        ]
        stubs: list[Any] = [DetectorStub(channel) for channel in channels]
        for _ in range(2):  # while connecting, and when all are connected
            for start in range(0, 1000, _AT_ONCE):
                calls = [
                    stub.GetModel.future(pb.GetModelRequest(), timeout=60)
                    for stub in stubs[start : start + _AT_ONCE]
                ]
                assert {call.result().name for call in calls} == {MODEL}
        request = pb.DetectRequest(image=image)
        detecting = [stub.Detect.future(request, timeout=60) for stub in stubs[::100]]
        assert all(call.result().detections for call in detecting)
        yield


@contextmanager
def reset_connections(address: str, image: bytes) -> Iterator[None]:
    for index in range(500):
        connection = http2.connect(address)
        if index % 2:
            connection.sendall(http2.call(1) + http2.incomplete_message(1))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    yield


@contextmanager
def garbage(address: str, image: bytes) -> Iterator[None]:
    random = np.random.default_rng(0)
    beginnings = b"", b"GET / HTTP/1.1\r\n\r\n", http2.PREFACE, http2.PREFACE + http2.call(1)
    for index in range(200):
        with http2.open_socket(address) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(beginnings[index % 4] + random.bytes(2000))
    yield


@contextmanager
def incomplete_messages(address: str, image: bytes) -> Iterator[None]:
    with ExitStack() as connections:
        for _ in range(20):
            connection = connections.enter_context(http2.connect(address))
            for stream in range(1, 101, 2):
                connection.sendall(http2.call(stream) + http2.incomplete_message(stream))
        yield


@contextmanager
def single_bytes(address: str, image: bytes) -> Iterator[None]:
    with http2.connect(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        whole = http2.call(1) + http2.message(1, pb.DetectRequest(image=image))
        for byte in whole[:2000]:
            connection.sendall(bytes([byte]))
        yield


@contextmanager
def rapid_resets(address: str, image: bytes) -> Iterator[None]:
    cancel = (8).to_bytes(4)
    with http2.connect(address) as connection:
        with contextlib.suppress(ConnectionError):
            for stream in range(1, 40_000, 2):
                reset = http2.frame(http2.RST_STREAM, 0, stream, cancel)
                connection.sendall(http2.call(stream) + reset)
        yield


@contextmanager
def endless_headers(address: str, image: bytes) -> Iterator[None]:
    more = http2.frame(http2.CONTINUATION, 0, 1, b"\0\1a\1b" * 3000)
    with http2.connect(address) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(http2.frame(http2.HEADERS, 0, 1))
        for _ in range(2000):
            connection.sendall(more)
    yield


def unread_responses(method: str, request: Callable[[bytes], Message]) -> Any:
    @contextmanager
    def attack(address: str, image: bytes) -> Iterator[None]:
        with ExitStack() as connections:
            for _ in range(10):
                connection = connections.enter_context(http2.connect(address, http2.NO_WINDOW))
                connection.settimeout(0.2)
                with contextlib.suppress(TimeoutError):  # the server stops reading the stream
                    for call in _calls(method, request(image)):
                        connection.sendall(call)
            yield

    return attack


def _calls(method: str, request: Message) -> Iterator[bytes]:
    """Yield the bytes of many calls, or of one stream with many requests."""
    if method == http2.DETECT:
        for stream in range(1, 2 * _CALLS, 2):
            yield http2.call(stream, method) + http2.message(stream, request)
    else:
        yield http2.call(1, method)
        for _ in range(250 * _CALLS):
            yield http2.message(1, request)


@contextmanager
def unread_health_responses(address: str, image: bytes) -> Iterator[None]:
    with ExitStack() as connections:
        for index in range(20):
            settings = http2.NO_WINDOW if index % 2 else b""
            connection = connections.enter_context(http2.connect(address, settings))
            method = f"/grpc.health.v1.Health/{('Watch', 'Check')[index % 2]}"
            with contextlib.suppress(TimeoutError, ConnectionError):
                for stream in range(1, 2 * _HEALTH_CALLS, 2):
                    request = http2.message(stream, HealthCheckRequest())
                    connection.sendall(http2.call(stream, method) + request)
        yield


def inference(image: bytes) -> open_inference_pb2.ModelInferRequest:
    request = open_inference_pb2.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="images", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(image)
    request.outputs.add(name="mask_probabilities")
    return request


def detection(image: bytes) -> pb.DetectRequest:
    return pb.DetectRequest(image=image, mask_format=pb.MASK_FORMAT_PROBABILITIES)


_ATTACKS: dict[str, Callable[[str, bytes], AbstractContextManager[None]]] = {
    attack.__name__: attack
    for attack in (
        thousand_connections,
        reset_connections,
        garbage,
        incomplete_messages,
        single_bytes,
        rapid_resets,
        endless_headers,
        unread_health_responses,
    )
} | {
    "unread_responses": unread_responses(http2.DETECT, detection),
    "unread_stream": unread_responses(http2.DETECT_STREAM, detection),
    "unread_inference_stream": unread_responses(INFER_STREAM, inference),
}


@pytest.mark.parametrize("name", _ATTACKS)
def test_server_recovers(server: Server, picture: Encode, name: str) -> None:
    image = picture()
    server.assert_serving(image)
    memory, files = memory_of(server.pid), server.files()
    with _ATTACKS[name](server.address, image):
        server.assert_serving(image)
        assert memory_of(server.pid) < memory + _SPARE_BYTES
    server.assert_serving(image)
    wait_until(lambda: server.files() <= files + _SPARE_FILES)
    assert memory_of(server.pid) < memory + _SPARE_BYTES
    assert "Traceback" not in server.log.read_text()

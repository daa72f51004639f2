"""Log of a real server process, also if it cannot be written."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import raw_http2 as http2
import trustme
from server_load import Process, server_process, starting_server
from triton_requests import MODEL

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.errors import ModelNotFoundError, QueueFullError
from maskrcnn_trt.serving.monitoring.logs import (
    AccessLog,
    extend_request_id,
    request_id,
    set_request_id,
)

Encode = Callable[..., bytes]

ID = "x-request-id"


@contextlib.contextmanager
def server(wide_bundle: Path, log: Path, *options: str) -> Iterator[str]:
    """Run a server, which must stop after SIGTERM. Yields the address."""
    options = "--drain-delay-s", "0", *options
    with server_process(wide_bundle, log, *options) as (process, address):
        yield address
        stop(process)


@contextlib.contextmanager
def server_without_streams(wide_bundle: Path, streams: str) -> Iterator[str]:
    """Run a server with its standard streams redirected by the shell. Yields the address."""
    # The server cannot print its port, so it gets one that was free a moment ago.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = "--port", address.rpartition(":")[2], "--drain-delay-s", "0", "--log-level", "debug"
    program = [sys.executable, "-m", "maskrcnn_trt", "serve", str(wide_bundle), *options]
    shell = ["sh", "-c", f'exec "$0" "$@" {streams}']
    with subprocess.Popen([*shell, *program], text=True) as process:
        try:
            yield address
            stop(process)
        finally:
            process.kill()


def stop(process: Process) -> None:
    process.terminate()
    assert process.wait(60) == 0


class Client:
    """Client that waits until the server is available."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub: Any = DetectorStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def detect(self, image: bytes, sent_id: str = "", **fields: Any) -> tuple[grpc.StatusCode, str]:
        """Send a request. Return the status and the request ID in the response."""
        call = self._stub.Detect.future(
            pb.DetectRequest(image=image, **fields),
            metadata=((ID, sent_id),) if sent_id else (),
            wait_for_ready=True,
            timeout=120,  # the server may still be starting
        )
        return call.code(), dict(call.trailing_metadata())[ID]

    def stream(self, *requests: pb.DetectRequest) -> tuple[list[str], str]:
        """Send a stream. Return the IDs of its responses, and the ID of the stream."""
        call = self._stub.DetectStream(iter(requests), timeout=60)
        return [response.id for response in call], dict(call.trailing_metadata())[ID]


def test_json_log_has_requests_with_their_ids_and_no_protocol_violations(
    wide_bundle: Path, picture: Encode, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    bad_metadata = (
        {"grpc-timeout": b"-5m"},
        {"grpc-encoding": b"snappy"},
        {"authorization": b"Bearer secret\xff"},
        {ID: b"\xff\xfe"},
    )
    options = "--log-format", "json", "--log-level", "debug"
    with server(wide_bundle, log, *options) as address, Client(address) as client:
        ok, sent = client.detect(picture(), "frame:7/b")
        assert (ok, sent) == (grpc.StatusCode.OK, "frame:7/b")
        _, generated = client.detect(b"no image", 'of "mine" and more', id="seven")
        assert re.fullmatch("[0-9a-f]{32}", generated)
        too_long = "x" * 129
        assert client.detect(picture(), too_long)[1] != too_long
        requests = [pb.DetectRequest(id=i, image=picture()) for i in ("1", "line\nbreak")]
        received, stream_id = client.stream(*requests)
        assert sorted(received) == ["1", "line\nbreak"]
        for metadata in bad_metadata:
            with http2.connect(address) as connection:
                connection.sendall(http2.call(1, metadata=metadata))
                connection.sendall(http2.message(1, pb.DetectRequest(image=b"no image")))
                http2.frames_until(connection, http2.HEADERS)

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= set(line)
        age = datetime.now(UTC) - datetime.fromisoformat(line["time"])
        assert timedelta() <= age < timedelta(minutes=5)
    *_, ready, stopping, stopped = (x["message"] for x in lines if "status" not in x)
    assert "ready at" in ready
    assert stopping.startswith("stopping")
    assert stopped == "stopped"
    assert "secret" not in log.read_text()
    logged = {line["request_id"]: line for line in lines if line.get("status")}
    assert {"frame:7/b", f"{generated}/seven", f"{stream_id}/1", stream_id} <= set(logged)
    first, second = logged["frame:7/b"], logged[f"{generated}/seven"]
    assert (first["level"], first["model"], first["status"]) == ("INFO", MODEL, "OK")
    assert first["images"] == 1
    assert first["bytes"] >= len(picture())
    assert 0 <= first["queue_ms"] < first["queue_ms"] + first["compute_ms"] < first["total_ms"]
    assert first["peer"].startswith("ipv4:127.0.0.1:")
    (timing,) = first["timings"]
    assert 0 < timing["infer_us"] / 1000 < first["total_ms"]
    assert (second["status"], second["timings"]) == ("INVALID_ARGUMENT", [])
    assert "not a JPEG" in second["error"]


def test_failed_handshakes_log_only_json(wide_bundle: Path, tmp_path: Path) -> None:
    log, certificate, key = (tmp_path / name for name in ("log", "certificate", "key"))
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    options = "--log-format", "json", "--tls-certificate", str(certificate), "--tls-key", str(key)
    with starting_server(wide_bundle, log, *options) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\xff" + bytes(255)):
            with http2.open_socket(ready["address"]) as client:
                client.sendall(sent)
                assert http2.is_closed(client)
        stop(process)
    messages = [json.loads(line)["message"] for line in log.read_text().splitlines()]
    assert any("ready at" in message for message in messages)


@pytest.mark.parametrize("streams", [">/dev/full 2>&1", ">&- 2>&-"])
def test_server_works_without_standard_streams(
    wide_bundle: Path, picture: Encode, streams: str
) -> None:
    with server_without_streams(wide_bundle, streams) as address, Client(address) as client:
        for _ in range(5):
            assert client.detect(picture())[0] is grpc.StatusCode.OK
            assert client.detect(b"no image")[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_blocked_log_pipe_does_not_block_requests(wide_bundle: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with (
        server(wide_bundle, pipe, "--log-level", "debug") as address,
        Client(address) as client,
    ):
        for _ in range(1000):  # lines of more than 100 bytes; a pipe holds 65,536
            assert client.detect(b"no image")[0] is grpc.StatusCode.INVALID_ARGUMENT
    os.close(reader)


PROGRAM = """
import logging
from maskrcnn_trt.serving.monitoring.logs import configure_logs, set_request_id, extend_request_id
configure_logs("{form}", "info")
log, other = logging.getLogger("maskrcnn_trt.serving.x"), logging.getLogger("other")
log.info("without request")
set_request_id("call")
extend_request_id("1")
log.info("%s request", "with", extra={{"answer": 42, "omitted": 7}})
log.debug("too much")
other.info("too much")
try:
    1 / 0
except ZeroDivisionError:
    other.exception("failed")
"""


def log_of(form: str, streams: str = "") -> str:
    """Run a program that logs. Return its log."""
    command = [
        "sh",
        "-c",
        f'exec "$0" -c "$1" {streams}',
        sys.executable,
        PROGRAM.format(form=form),
    ]
    return subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True).stderr


def test_text_format() -> None:
    first, second, third, *traceback = log_of("text").splitlines()
    assert re.fullmatch(r"[-0-9]+ [:,0-9]+ INFO maskrcnn_trt.serving.x: without request", first)
    assert " INFO maskrcnn_trt.serving.x: with request " in second
    assert second.endswith(" (earlier lines omitted: 7) [call/1]")
    assert third.endswith(" ERROR other: failed [call/1]")
    assert traceback[-1] == "ZeroDivisionError: division by zero"


def test_json_format() -> None:
    first, second, third = map(json.loads, log_of("json").splitlines())
    assert "request_id" not in first
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", second.pop("time"))
    assert second == {
        "level": "INFO",
        "logger": "maskrcnn_trt.serving.x",
        "message": "with request",
        "request_id": "call/1",
        "answer": 42,
        "omitted": 7,
    }
    assert third["exception"].endswith("ZeroDivisionError: division by zero")


def test_requests_are_sampled_at_info(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog()
    with caplog.at_level("INFO", "maskrcnn_trt.serving"):
        for number in range(300):
            failure = None if number % 2 else QueueFullError("no slot")
            log.log_request("m", "ipv4:1", failure, size=7, timings=(), elapsed_s=0.1)
        log.log_rejected_call("/a/b", "ipv4:1", QueueFullError("no slot"))
    failed = [vars(record) for record in caplog.records if vars(record)["status"] != "OK"]
    # Within one second, or in two if the clock's second changes meanwhile.
    assert 10 <= len(failed) <= 20
    assert (failed[0]["status"], failed[0]["error"]) == ("RESOURCE_EXHAUSTED", "no slot")
    assert 10 <= len(caplog.records) - len(failed) <= 20
    with caplog.at_level("WARNING", "maskrcnn_trt.serving"):
        before = len(caplog.records)
        log.log_request("m", "ipv4:1", None, size=7, timings=(), elapsed_s=0.1)
        assert len(caplog.records) == before
    with caplog.at_level("DEBUG", "maskrcnn_trt.serving"):
        log.log_request("m", "ipv4:1", None, size=7, timings=(), elapsed_s=0.1)
        assert vars(caplog.records[-1])["omitted"] > 100


def test_requests_for_unknown_models_have_short_lines(caplog: pytest.LogCaptureFixture) -> None:
    log, failure = AccessLog(), ModelNotFoundError(f"model {10_000 * 'x'!r} is not served")
    with caplog.at_level("INFO", "maskrcnn_trt.serving"):
        log.log_request(None, "ipv4:1", failure, size=7, timings=(), elapsed_s=0.1)
    (record,) = caplog.records
    assert record.message.startswith("request for an unknown model from ipv4:1: NOT_FOUND")
    assert not hasattr(record, "model")
    assert vars(record)["error"].startswith("model 'xxx")
    assert len(vars(record)["error"]) <= 2048


def test_unwritable_log_is_no_failure() -> None:
    assert log_of("json", "2>/dev/full") == ""
    assert log_of("text", "2>&-") == ""


@pytest.mark.parametrize("invalid", ["", "a b", "a\nb", "a\u2028b", 'a"', "x" * 129, "é"])
def test_ids_that_could_forge_log_lines_are_replaced(invalid: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", set_request_id(invalid))
    assert set_request_id("good") == "good"
    extend_request_id(invalid)
    assert request_id.get() == "good"

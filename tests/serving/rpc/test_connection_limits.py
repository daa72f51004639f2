"""Limits on connections."""

import asyncio
import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import raw_http2 as http2
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from in_process_server import gets_detections, served, served_in_thread

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.rpc import listener

Encode = Callable[..., bytes]


# Identifiers of SETTINGS_INITIAL_WINDOW_SIZE and SETTINGS_MAX_FRAME_SIZE.
_WINDOW_SETTING, _FRAME_SETTING = 4, 5


@pytest.fixture(scope="module")
def address(wide_bundle: Path) -> Iterator[str]:
    """Address of a server with more slots than calls per connection."""
    with served_in_thread(wide_bundle, queue_size=4000) as address:
        yield address


def test_concurrent_calls_per_connection_are_limited(address: str) -> None:
    with http2.connect(address) as connection:
        for stream in range(1, 4001, 2):
            connection.sendall(http2.call(stream))
        connection.sendall(http2.frame(http2.PING, payload=b"all sent"))
        frames = http2.frames_until(connection, http2.RST_STREAM)
        refused = http2.REFUSED_STREAM.to_bytes(4)
        assert [f for f in frames if f[0] == http2.RST_STREAM and f[2] == refused]
        assert frames[-1][1] > 2 * 255


def test_bytes_that_no_call_has_read_are_limited(address: str) -> None:
    request = http2.message(1, pb.DetectRequest(image=bytes(1 << 20)))
    with http2.connect(address) as connection:
        (settings, *_) = http2.frames_until(connection, http2.SETTINGS)
        payload = settings[2]
        entries = (payload[start : start + 6] for start in range(0, len(payload), 6))
        values = {int.from_bytes(e[:2]): int.from_bytes(e[2:]) for e in entries}
        assert values[_WINDOW_SETTING] == values[_FRAME_SETTING] == 4 << 20
        # gRPC's estimate of the window would send a ping with the response.
        connection.sendall(http2.call(1) + request + http2.frame(http2.DATA, http2.END_STREAM, 1))
        frames = http2.frames_until(connection, http2.HEADERS)
        assert http2.PING not in {kind for kind, _, _ in frames}


def test_client_with_too_many_pings_is_disconnected(address: str) -> None:
    with http2.connect(address) as connection, contextlib.suppress(ConnectionError):
        for _ in range(10):
            connection.sendall(http2.frame(http2.PING, payload=b"8 octets"))
        frames = http2.frames_until(connection, http2.GOAWAY)
        assert frames[-1][2].endswith(b"too_many_pings")


def test_unresponsive_connections_are_pinged_and_closed(
    wide_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_PING_TIMEOUT_MS", 500)
    monkeypatch.setattr(listener, "_HANDSHAKE_MS", 500)
    with (
        served_in_thread(wide_bundle, keepalive_s=1) as address,
        http2.open_socket(address) as before_handshake,
        http2.connect(address) as silent,
    ):
        assert http2.frames_until(silent, http2.PING)[-1][2]
        assert http2.is_closed(silent)
        assert http2.is_closed(before_handshake)


async def test_calls_of_one_connection_do_not_end_those_of_others(
    wide_bundle: Path, picture: Encode
) -> None:
    async with served(wide_bundle) as address:
        # The server runs in this thread. Until `to_thread` below, it accepts no calls.
        with http2.connect(address) as greedy, http2.connect(address) as modest:
            for stream in range(1, 6001, 2):
                greedy.sendall(http2.call(stream))
            http2.frames_until(greedy, http2.RST_STREAM, 2001)
            request = http2.message(1, pb.DetectRequest(image=picture()))
            end = http2.frame(http2.DATA, http2.END_STREAM, 1)
            modest.sendall(http2.call(1) + request + end)
            modest.sendall(http2.frame(http2.PING, payload=b"all sent"))
            # The server also sends PING frames of its own.
            http2.frames_until(modest, http2.PING, payload=b"all sent")
            frames = await asyncio.to_thread(http2.frames_until, modest, http2.DATA)
            assert frames[-1][1] == 1


async def test_connections_are_limited(wide_bundle: Path, picture: Encode) -> None:
    async with served(wide_bundle, max_connections=3) as address:
        with contextlib.ExitStack() as open_connections:
            for _ in range(3):
                open_connections.enter_context(http2.connect(address))
            await asyncio.sleep(0.2)
            with http2.connect(address) as one_more:
                assert await asyncio.to_thread(http2.is_closed, one_more)
        # The server notices with a delay that the others have disconnected.
        assert await gets_detections(address, picture(), wait=True)


def test_connections_are_limited_by_open_files(
    wide_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("open files are not limited")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        with served_in_thread(wide_bundle, max_connections=100_000_000):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert f"{hard} files" in caplog.text


async def test_old_connections_are_ended_and_clients_reconnect(
    wide_bundle: Path, picture: Encode
) -> None:
    async with served(wide_bundle, max_connection_age_s=0.5, stop_grace_s=5) as address:
        with http2.connect(address) as connection:
            await asyncio.to_thread(http2.frames_until, connection, http2.GOAWAY)
        async with grpc.aio.insecure_channel(address) as channel:
            for _ in range(6):
                await HealthStub(channel).Check(HealthCheckRequest())
                await asyncio.sleep(0.2)
        assert await gets_detections(address, picture())

"""What connections may do, each limit by its effect."""

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import raw_http2 as http2
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from limited_server import answers_rightly, served

from maskrcnn_trt.serving.transport import listening

Encode = Callable[..., bytes]


def test_streams_of_a_connection_are_limited(bundle: Path) -> None:
    async def ask() -> None:
        async with served(bundle, queue_size=4000) as address:
            with http2.connect(address) as connection:
                for stream in range(1, 4001, 2):
                    connection.sendall(http2.call(stream))
                connection.sendall(http2.frame(http2.PING, payload=b"all sent"))
                frames = await asyncio.to_thread(http2.frames_until, connection, http2.RST_STREAM)
                refused = http2.REFUSED_STREAM.to_bytes(4)
                assert [f for f in frames if f[0] == http2.RST_STREAM and f[2] == refused]
                assert frames[-1][1] > 2 * 999

    asyncio.run(ask())


def test_calls_that_wait_to_be_looked_at_are_limited(bundle: Path, picture: Encode) -> None:
    async def ask() -> None:
        async with served(bundle, queue_size=1) as address:
            with grpc.insecure_channel(address) as channel:
                await asyncio.to_thread(grpc.channel_ready_future(channel).result)
                detect = channel.unary_unary(http2.DETECT)
                calls = [detect.future(b"garbage") for _ in range(600)]
                time.sleep(2)  # in which the server looks at none, as it runs in this thread
                ended = [call.code() for call in calls if call.done()]
                assert 600 - 512 <= len(ended) <= 600 - 256
                assert set(ended) == {grpc.StatusCode.CANCELLED}
                seen = [await asyncio.to_thread(call.code) for call in calls]
                assert seen.count(grpc.StatusCode.CANCELLED) == len(ended)
            assert await answers_rightly(address, picture())

    asyncio.run(ask())


def test_connections_are_limited(bundle: Path, picture: Encode) -> None:
    async def ask() -> None:
        async with served(bundle, max_connections=3) as address:
            with contextlib.ExitStack() as open_connections:
                for _ in range(3):
                    open_connections.enter_context(http2.connect(address))
                await asyncio.sleep(0.2)
                with http2.connect(address) as one_more:
                    assert await asyncio.to_thread(http2.is_closed, one_more)
            # The server notices a little later that the others have left.
            assert await answers_rightly(address, picture(), in_time=True)

    asyncio.run(ask())


def test_connections_are_as_many_as_files_may_be_open(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        async with served(bundle, max_connections=100_000_000):
            pass

    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("any number of files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        asyncio.run(ask())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert f"the process may open {hard} files" in caplog.text


def test_client_that_floods_with_pings_is_sent_away(bundle: Path, picture: Encode) -> None:
    async def ask() -> None:
        async with served(bundle) as address:
            with http2.connect(address) as connection, contextlib.suppress(ConnectionError):
                for _ in range(10):
                    connection.sendall(http2.frame(http2.PING, payload=b"are you?"))
                frames = await asyncio.to_thread(http2.frames_until, connection, http2.GOAWAY)
                assert frames[-1][2].endswith(b"too_many_pings")
            assert await answers_rightly(address, picture())

    asyncio.run(ask())


def test_client_is_asked_whether_it_is_there(bundle: Path) -> None:
    async def ask() -> None:
        async with served(bundle, keepalive_s=1) as address:
            with http2.connect(address) as silent:
                pings = await asyncio.to_thread(http2.frames_until, silent, http2.PING)
                assert pings[-1][2]

    asyncio.run(ask())


def test_connections_with_nobody_there_are_dropped(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_PING_TIMEOUT_MS", 500)
    monkeypatch.setattr(listening, "_HANDSHAKE_MS", 500)

    async def ask() -> None:
        async with served(bundle, keepalive_s=1) as address:
            for opened in (http2.connect, http2.open_socket):  # half-open, and never a word
                with opened(address) as silent:
                    assert await asyncio.to_thread(http2.is_closed, silent)

    asyncio.run(ask())


def test_old_connections_are_ended_and_clients_connect_anew(bundle: Path, picture: Encode) -> None:
    async def ask() -> None:
        async with served(bundle, max_connection_age_s=0.5, stop_grace_s=5) as address:
            with http2.connect(address) as connection:
                await asyncio.to_thread(http2.frames_until, connection, http2.GOAWAY)
            async with grpc.aio.insecure_channel(address) as channel:
                for _ in range(6):
                    await HealthStub(channel).Check(HealthCheckRequest())
                    await asyncio.sleep(0.2)
            assert await answers_rightly(address, picture())

    asyncio.run(ask())

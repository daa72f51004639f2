"""What connections, calls and messages may do, each limit by its effect."""

import asyncio
import contextlib
import logging
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import raw_http2 as http2
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving import listening
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GARBAGE = b"\xff\xff\xff\xff"
BAD, LATE, BUSY = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


@contextlib.asynccontextmanager
async def served(bundle: Path, **settings: Any) -> AsyncIterator[str]:
    settings = {"max_delay_ms": 0, "drain_delay_s": 0, "stop_grace_s": 0} | settings
    async with detection_server(bundle, ServeConfig(port=0, **settings)) as address:
        yield address


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details() or ""


async def answers_rightly(address: str, image: bytes) -> bool:
    """Whether a new client is served."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = DetectorStub(channel)
        response = await stub.Detect(pb.DetectRequest(id="new", image=image), timeout=60)
        return response.id == "new" and len(response.detections) > 0


def test_message_that_does_not_parse_is_the_clients_fault(
    bundle: Path, caplog: pytest.LogCaptureFixture, picture: Encode
) -> None:
    async def ask() -> None:
        async with (
            served(bundle) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            unary = channel.unary_unary(http2.DETECT)
            calls = [unary(GARBAGE) for _ in range(1000)]
            for call in calls:
                status, message = await status_of(call)
                assert (status, message[:28]) == (BAD, "the message is no request of")
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(GARBAGE)
            assert (await status_of(watch))[0] is BAD
            for method in (http2.DETECT_STREAM, REFLECTION):
                stream = channel.stream_stream(method)
                good = pb.DetectRequest(id="1", image=picture()).SerializeToString()
                call = stream(
                    iter([good, GARBAGE, good] if method == http2.DETECT_STREAM else [GARBAGE])
                )
                with contextlib.suppress(grpc.RpcError):
                    answers = [pb.DetectStreamResponse.FromString(a) async for a in call]
                    assert [answer.id for answer in answers] == ["1"]
                assert (await status_of(call))[0] is BAD
            assert await answers_rightly(address, picture())

    caplog.set_level(logging.WARNING, "grpc")
    asyncio.run(ask())
    assert not caplog.records


def test_call_without_a_message(bundle: Path) -> None:
    async def ask() -> None:
        async with served(bundle) as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_unary(http2.DETECT)(iter([]))
            assert await status_of(call) == (BAD, "the call ended before its request")
            answers = channel.stream_stream(http2.DETECT_STREAM)(iter([]))
            assert [answer async for answer in answers] == []

    asyncio.run(ask())


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_message_too_large_is_refused_though_it_be_compressed(
    bundle: Path, picture: Encode, compression: grpc.Compression | None
) -> None:
    async def ask() -> None:
        async with served(bundle, max_message_mb=1) as address:
            options = [("grpc.max_send_message_length", -1)]
            async with grpc.aio.insecure_channel(
                address, options=options, compression=compression
            ) as channel:
                stub: Any = DetectorStub(channel)
                status, message = await status_of(
                    stub.Detect(pb.DetectRequest(image=bytes(100 << 20)))
                )
                assert status is BUSY
                assert "larger than max" in message
                assert (await stub.Detect(pb.DetectRequest(image=picture()))).detections

    asyncio.run(ask())


def test_request_that_does_not_arrive_is_not_waited_for(bundle: Path, picture: Encode) -> None:
    async def ask() -> None:
        async with (
            served(bundle, receive_timeout_s=0.3) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            never = asyncio.Event()

            async def nothing() -> AsyncIterator[bytes]:
                await never.wait()
                yield b""

            call = channel.stream_unary(http2.DETECT)(nothing())
            status, message = await status_of(call)
            assert (status, message) == (LATE, "the message did not arrive within 0.3 s")
            stream: Any = DetectorStub(channel).DetectStream()
            await asyncio.sleep(0.5)  # streams may be silent
            await stream.write(pb.DetectRequest(id="late", image=picture()))
            assert (await stream.read()).id == "late"
            stream.cancel()

    asyncio.run(ask())


@pytest.mark.parametrize("method", [http2.DETECT, http2.DETECT_STREAM])
def test_messages_that_stop_half_way_keep_nobody_out(
    bundle: Path, picture: Encode, method: str
) -> None:
    async def ask() -> None:
        async with served(bundle, queue_size=8) as address:
            with contextlib.ExitStack() as open_connections:
                for _ in range(20):
                    connection = open_connections.enter_context(http2.connect(address))
                    for stream in range(1, 9, 2):
                        half = http2.call(stream, method) + http2.message_that_stops(stream)
                        await asyncio.to_thread(connection.sendall, half)
                assert await answers_rightly(address, picture())
                assert await answers_rightly(address, picture())

    asyncio.run(ask())


def test_stream_that_waits_longest_gives_way(bundle: Path, picture: Encode) -> None:
    async def ask() -> None:
        async with (
            served(bundle, queue_size=2) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            stub: Any = DetectorStub(channel)
            streams = []
            for index in range(5):  # one more than are waited for
                streams.append(stub.DetectStream())
                await streams[-1].write(pb.DetectRequest(id=str(index), image=picture()))
                assert (await streams[-1].read()).response.detections
            status, message = await status_of(streams[0])
            assert status is BUSY
            assert "for this one longest" in message
            await streams[4].write(pb.DetectRequest(id="again", image=picture()))
            assert (await streams[4].read()).id == "again"
            for stream in streams:
                stream.cancel()

    asyncio.run(ask())


def test_streams_of_a_connection_are_limited(bundle: Path) -> None:
    async def ask() -> None:
        async with served(bundle, queue_size=1) as address:
            with http2.connect(address) as connection:
                for stream in range(1, 4001, 2):
                    connection.sendall(http2.call(stream))
                connection.sendall(http2.frame(http2.PING, payload=b"all sent"))
                frames = await asyncio.to_thread(http2.frames_until, connection, http2.RST_STREAM)
                refused = http2.REFUSED_STREAM.to_bytes(4)
                assert [f for f in frames if f[0] == http2.RST_STREAM and f[2] == refused]
                assert frames[-1][1] > 2 * 999

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
            assert await answers_rightly(address, picture())

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

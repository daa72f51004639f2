"""Keepalive: idle connections, vanished servers, and the age limit of connections."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process_server import served
from tcp_proxy import proxied

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient, connection
from maskrcnn_trt.serving.errors import UnreachableError
from maskrcnn_trt.serving.rpc import listener as listening

Encode = Callable[..., bytes]
Pause = Callable[[], None]
Stream = Callable[[str, bytes, Pause], Coroutine[Any, Any, list[int]]]

# Long enough for more pings than gRPC servers allow by default.
_IDLE_S = 8.0


async def stream_sync(address: str, image: bytes, pause: Pause) -> list[int]:
    """Stream two images with a pause after the first result, and return the results' indices."""
    answered = threading.Event()

    def images() -> Iterator[bytes]:
        yield image
        answered.wait(60)
        pause()
        yield image

    def run() -> list[int]:
        indices = []
        with DetectorClient(address, keepalive_s=1) as client:
            for index, _ in client.stream(images()):
                indices.append(index)
                answered.set()
        return indices

    return await asyncio.to_thread(run)


async def stream_async(address: str, image: bytes, pause: Pause) -> list[int]:
    answered = asyncio.Event()

    async def images() -> AsyncIterator[bytes]:
        yield image
        await answered.wait()
        await asyncio.to_thread(pause)
        yield image

    indices = []
    async with AsyncDetectorClient(address, keepalive_s=1) as client:
        async for index, _ in client.stream(images()):
            indices.append(index)
            answered.set()
    return indices


async def end_unreachable(address: str, image: bytes, on_pause: Pause, match: str) -> None:
    """Check that streams of both clients end with an error while no image is sent."""

    async def end(stream: Stream) -> None:
        ended = threading.Event()

        def pause() -> None:
            on_pause()
            ended.wait(60)

        try:
            with pytest.raises(UnreachableError, match=match):
                await stream(address, image, pause)
        finally:
            ended.set()

    await asyncio.gather(end(stream_sync), end(stream_async))


async def test_streams_end_when_the_server_vanishes(
    address: str, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PING_TIMEOUT_MS", 500)
    paused = threading.Barrier(2)
    async with proxied(address) as proxy:

        def vanish() -> None:
            paused.wait(60)  # both streams have their first result
            proxy.silent = True

        await end_unreachable(proxy.address, picture(), vanish, "stopped responding")


@pytest.mark.slow
async def test_idle_streams_stay_open(
    bundle: Path, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_CLIENT_PING_MS", 500)

    async def idle_stream(address: str, stream: Stream) -> None:
        async with proxied(address) as proxy:
            bytes_sent = []

            def idle() -> None:
                bytes_sent.append(proxy.sent)
                time.sleep(_IDLE_S)
                bytes_sent.append(proxy.sent)

            assert await stream(proxy.address, picture(), idle) == [0, 1]
            assert proxy.connections == 1
            assert bytes_sent[1] > bytes_sent[0]  # pings

    async with served(bundle) as address:
        await asyncio.gather(*(idle_stream(address, s) for s in (stream_sync, stream_async)))


async def test_streams_end_with_the_age_limit_of_their_connection(
    bundle: Path, picture: Encode
) -> None:
    reason = r"age.*--max-connection-age-s"
    async with served(bundle, max_connection_age_s=0.5, stop_grace_s=0.5) as address:
        await end_unreachable(address, picture(), lambda: None, reason)


def test_server_allows_the_default_keepalive() -> None:
    assert 1000 * connection.KEEPALIVE_S > listening._CLIENT_PING_MS
    for seconds in (0, 0.5, float("nan")):
        with pytest.raises(ValueError, match="keepalive_s is"):
            DetectorClient("localhost:1", keepalive_s=seconds)
    DetectorClient("localhost:1", keepalive_s=float("inf")).close()

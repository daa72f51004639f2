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


both_streams = pytest.mark.parametrize("stream", [stream_sync, stream_async])


@both_streams
def test_stream_ends_when_the_server_vanishes(
    bundle: Path, picture: Encode, monkeypatch: pytest.MonkeyPatch, stream: Stream
) -> None:
    monkeypatch.setattr(connection, "_PING_TIMEOUT_MS", 500)
    ended = threading.Event()

    async def run() -> None:
        async with served(bundle) as address, proxied(address) as proxy:

            def vanish() -> None:
                proxy.silent = True
                ended.wait(60)

            try:
                with pytest.raises(UnreachableError, match="stopped responding"):
                    await stream(proxy.address, picture(), vanish)
            finally:
                ended.set()

    asyncio.run(run())


@pytest.mark.slow
def test_idle_streams_stay_open(
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

    async def run() -> None:
        async with served(bundle) as address:
            await asyncio.gather(*(idle_stream(address, s) for s in (stream_sync, stream_async)))

    asyncio.run(run())


@both_streams
def test_stream_ends_with_the_age_limit_of_its_connection(
    bundle: Path, picture: Encode, stream: Stream
) -> None:
    ended = threading.Event()

    async def run() -> None:
        async with served(bundle, max_connection_age_s=0.5, stop_grace_s=0.5) as address:
            try:
                with pytest.raises(UnreachableError, match=r"age.*--max-connection-age-s"):
                    await stream(address, picture(), lambda: ended.wait(60))
            finally:
                ended.set()

    asyncio.run(run())


def test_server_allows_the_default_keepalive() -> None:
    assert 1000 * connection.KEEPALIVE_S > listening._CLIENT_PING_MS
    for seconds in (0, 0.5, float("nan")):
        with pytest.raises(ValueError, match="keepalive_s is"):
            DetectorClient("localhost:1", keepalive_s=seconds)
    DetectorClient("localhost:1", keepalive_s=float("inf")).close()

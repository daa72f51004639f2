"""Clients whose connection is silent, because nothing is to be said or nobody is there."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from limited_server import served
from tcp_proxy import proxied

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient, connection
from maskrcnn_trt.serving.errors import UnreachableError
from maskrcnn_trt.serving.transport import listening

Encode = Callable[..., bytes]
Pause = Callable[[], None]
Ask = Callable[[str, bytes, Pause], Coroutine[Any, Any, list[int]]]

_IDLE_S = 8.0
"""More pings than a server bears that has not allowed for them."""


async def stream(address: str, image: bytes, pause: Pause) -> list[int]:
    """The places of what a stream answers about two images, with a pause after the first answer."""
    answered = threading.Event()

    def images() -> Iterator[bytes]:
        yield image
        answered.wait(60)
        pause()
        yield image

    def ask() -> list[int]:
        places = []
        with DetectorClient(address, keepalive_s=1) as client:
            for place, _ in client.stream(images()):
                places.append(place)
                answered.set()
        return places

    return await asyncio.to_thread(ask)


async def stream_async(address: str, image: bytes, pause: Pause) -> list[int]:
    answered = asyncio.Event()

    async def images() -> AsyncIterator[bytes]:
        yield image
        await answered.wait()
        await asyncio.to_thread(pause)
        yield image

    places = []
    async with AsyncDetectorClient(address, keepalive_s=1) as client:
        async for place, _ in client.stream(images()):
            places.append(place)
            answered.set()
    return places


both_streams = pytest.mark.parametrize("ask", [stream, stream_async])


@both_streams
def test_stream_ends_when_the_server_vanishes(
    bundle: Path, picture: Encode, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.setattr(connection, "_PING_TIMEOUT_MS", 500)
    ended = threading.Event()

    async def wait_for_it() -> None:
        async with served(bundle) as address, proxied(address) as proxy:

            def vanish() -> None:
                proxy.silent = True
                ended.wait(60)

            try:
                with pytest.raises(UnreachableError, match=r"fell silent .*try again later"):
                    await ask(proxy.address, picture(), vanish)
            finally:
                ended.set()

    asyncio.run(wait_for_it())


@both_streams
def test_idle_stream_lives_on(
    bundle: Path, picture: Encode, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.setattr(listening, "_CLIENT_PING_MS", 500)

    async def wait() -> None:
        async with served(bundle) as address, proxied(address) as proxy:
            before = []

            def rest() -> None:
                before.append(proxy.sent)
                time.sleep(_IDLE_S)
                before.append(proxy.sent)

            assert await ask(proxy.address, picture(), rest) == [0, 1]
            assert proxy.connections == 1
            assert before[1] > before[0]  # it has asked

    asyncio.run(wait())


@both_streams
def test_stream_that_outlives_its_connection_is_told_so(
    bundle: Path, picture: Encode, ask: Ask
) -> None:
    ended = threading.Event()

    async def wait_for_it() -> None:
        async with served(bundle, max_connection_age_s=0.5, stop_grace_s=0.5) as address:
            try:
                with pytest.raises(UnreachableError, match=r"ended the connection.*send again"):
                    await ask(address, picture(), lambda: ended.wait(60))
            finally:
                ended.set()

    asyncio.run(wait_for_it())


def test_server_allows_for_what_clients_ask_by_default() -> None:
    assert 1000 * connection.KEEPALIVE_S > listening._CLIENT_PING_MS
    for seconds in (0, 0.5, float("nan")):
        with pytest.raises(ValueError, match=r"keepalive_s is .*give 1 or more"):
            DetectorClient("localhost:1", keepalive_s=seconds)
    DetectorClient("localhost:1", keepalive_s=float("inf")).close()

"""Clients tell what a server says of its being out of order from there being none."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from limited_server import served
from many_requests import Run, both_runs
from server_load import server_process
from stub_server import Detector, both_ways, serving

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import RefusedError, UnreachableError

Encode = Callable[..., bytes]


@both_runs
def test_engine_that_is_loaded_again_is_told_and_outlived(
    bundle: Path, gate: Gate, picture: Encode, run: Callable[..., Run]
) -> None:
    outcomes: list[Any] = []

    def images() -> Iterator[bytes]:
        yield from [picture()] * 9
        gate.break_with(None)
        gate.open()
        while not isinstance(outcomes[-1], Detections):
            yield picture()

    async def ask() -> None:
        async with served(bundle) as address:
            ask_for = partial(asyncio.to_thread, run, address, concurrency=1, retries=0)
            gate.break_with(RuntimeError("no memory"))
            broken = (await ask_for([picture()] * 3)).outcomes
            assert [error.code for error in broken] == [grpc.StatusCode.INTERNAL] * 3
            gate.close()  # for the new one to take its time
            assert (await ask_for(images(), into=outcomes)).end is None

    asyncio.run(ask())
    refused = [(o.code, str(o)) for o in outcomes if isinstance(o, RefusedError)]
    assert len(refused) > 7
    sentence = "the model failed and is being loaded again; try again in a while"
    assert set(refused) == {(grpc.StatusCode.UNAVAILABLE, sentence)}


def test_stream_tells_that_the_server_is_stopping(bundle: Path, picture: Encode) -> None:
    answered = asyncio.Event()

    async def images() -> AsyncIterator[bytes]:
        yield picture()
        await asyncio.Event().wait()

    async def stream(address: str) -> None:
        async with AsyncDetectorClient(address) as client:
            async for _ in client.stream(images()):
                answered.set()

    async def ask() -> None:
        async with served(bundle, stop_grace_s=30) as address:
            streaming = asyncio.create_task(stream(address))
            await answered.wait()
        with pytest.raises(RefusedError, match=r"^the server is stopping$") as caught:
            await streaming
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE

    asyncio.run(ask())


def test_server_that_is_killed_has_said_nothing(
    bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    with (
        server_process(bundle, tmp_path / "log") as (process, address),
        DetectorClient(address, retries=0) as client,
    ):

        def images() -> Iterator[bytes]:
            yield picture()
            process.kill()
            process.wait()

        with pytest.raises(UnreachableError, match="closed the connection; it stopped"):
            list(client.stream(images()))
        with pytest.raises(UnreachableError, match=r"it stopped|start one"):
            client.detect(picture())


@both_ways
def test_what_stands_before_a_server_is_not_taken_for_it(ask: Callable[..., Detections]) -> None:
    away = Detector([grpc.StatusCode.UNAVAILABLE])
    with serving(away) as address, pytest.raises(UnreachableError, match=r"\(not now\); start one"):
        ask(address, retries=0)

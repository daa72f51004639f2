"""Clients distinguish a server that reports an error from one that is unreachable."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from in_process_server import served
from many_requests import Run, both_runs
from server_load import server_process
from stub_server import StubDetector, both_clients, stub_server

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import RefusedError, UnreachableError

Encode = Callable[..., bytes]


@both_runs
async def test_run_survives_the_restart_of_an_engine(
    bundle: Path, gate: Gate, picture: Encode, run: Callable[..., Run]
) -> None:
    outcomes: list[Any] = []

    def images() -> Iterator[bytes]:
        yield from [picture()] * 9
        gate.break_with(None)
        gate.open()
        while not isinstance(outcomes[-1], Detections):
            yield picture()

    async with served(bundle) as address:
        detect_many = partial(asyncio.to_thread, run, address, concurrency=1, retries=0)
        gate.break_with(RuntimeError("no memory"))
        broken = (await detect_many([picture()] * 3)).outcomes
        assert [error.code for error in broken] == [grpc.StatusCode.INTERNAL] * 3
        gate.close()  # keeps the new engine from starting
        assert (await detect_many(images(), into=outcomes)).error is None
    refused = [outcome for outcome in outcomes if isinstance(outcome, RefusedError)]
    assert len(refused) > 7
    assert {error.code for error in refused} == {grpc.StatusCode.UNAVAILABLE}
    assert all("try again" in str(error) for error in refused)


async def test_stream_reports_that_the_server_is_stopping(bundle: Path, picture: Encode) -> None:
    answered = asyncio.Event()

    async def images() -> AsyncIterator[bytes]:
        yield picture()
        await asyncio.Event().wait()

    async def stream(address: str) -> None:
        async with AsyncDetectorClient(address) as client:
            async for _ in client.stream(images()):
                answered.set()

    async with served(bundle, stop_grace_s=30) as address:
        streaming = asyncio.create_task(stream(address))
        await answered.wait()
    with pytest.raises(RefusedError, match="stopping") as caught:
        await streaming
    error = caught.value
    assert error.code is grpc.StatusCode.UNAVAILABLE
    # Otherwise, a process of a pool could not return it, and `Pool.map` would wait forever.
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), copied.code, str(copied)) == (RefusedError, error.code, str(error))


def test_killed_server_is_unreachable(bundle: Path, tmp_path: Path, picture: Encode) -> None:
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


@both_clients
def test_status_of_a_proxy_is_not_taken_for_the_servers(detect: Callable[..., Detections]) -> None:
    proxy = StubDetector([grpc.StatusCode.UNAVAILABLE])
    with (
        stub_server(proxy) as address,
        pytest.raises(UnreachableError, match=r"\(not now\); start one"),
    ):
        detect(address, retries=0)

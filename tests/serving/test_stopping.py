"""Servers that stop while clients go on asking, over several connections."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import raw_http2 as http2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from server_load import Process, server_process

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.messages import REQUEST_ID_KEY

Encode = Callable[..., bytes]

# All that is asked is computed, however slow the machine is.
OPTIONS = "--max-wait-s", "600", "--log-level", "debug", "--log-format", "json"
CONNECTIONS = 4
CALLS = 2  # at once of each


class Askers:
    """Who ask time and again, and what they got."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    async def get(self, count: int) -> None:
        """Wait for so many more outcomes."""
        enough = len(self.outcomes) + count
        async with asyncio.timeout(60):
            while len(self.outcomes) < enough:
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def asking(*asks: Callable[[], Any]) -> AsyncIterator[Askers]:
    """Ask within the context, again as soon as there is an outcome."""
    askers, is_over = Askers(), asyncio.Event()

    async def go_on(ask: Callable[[], Any]) -> None:
        while not is_over.is_set():
            askers.outcomes.append(await ask())

    async with asyncio.TaskGroup() as tasks:
        for ask in asks:
            tasks.create_task(go_on(ask))
        yield askers
        is_over.set()


def statuses_in(log: Path) -> list[str]:
    """Of all requests that a server looked at."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line["status"] for line in lines if "status" in line]


async def end_of(process: Process) -> int:
    process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(process.wait, 60)


def test_what_a_stopping_server_looked_at_is_answered(
    bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    log, request = tmp_path / "log", pb.DetectRequest(image=picture())

    async def ask(stub: Any) -> tuple[grpc.StatusCode, bool]:
        call = stub.Detect(request, timeout=60)
        status, metadata = await call.code(), await call.trailing_metadata()
        if status is not grpc.StatusCode.OK:
            await asyncio.sleep(0.02)
        return status, REQUEST_ID_KEY in dict(metadata or ())

    async def run(process: Process, address: str) -> list[tuple[grpc.StatusCode, bool]]:
        async with contextlib.AsyncExitStack() as channels:
            asks = []
            for _ in range(CONNECTIONS):
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = grpc.aio.insecure_channel(address, options)
                stub: Any = DetectorStub(await channels.enter_async_context(channel))
                asks += CALLS * [lambda stub=stub: ask(stub)]
            async with asking(*asks) as askers:
                await askers.get(20)
                assert await end_of(process) == 0
                await askers.get(20)
            return askers.outcomes

    with server_process(bundle, log, *OPTIONS) as server:
        outcomes = asyncio.run(run(*server))
    answered = outcomes.count((grpc.StatusCode.OK, True))
    assert statuses_in(log) == answered * ["OK"]
    # Of the others the server knows nothing. gRPC cancels those that come while it closes.
    others = {outcome for outcome in outcomes if outcome != (grpc.StatusCode.OK, True)}
    assert (grpc.StatusCode.UNAVAILABLE, False) in others
    assert others <= {(grpc.StatusCode.UNAVAILABLE, False), (grpc.StatusCode.CANCELLED, False)}


def test_clients_that_send_nothing_do_not_keep_a_server_from_stopping(
    bundle: Path, tmp_path: Path
) -> None:
    async def ask() -> None:
        with server_process(bundle, tmp_path / "log", "--stop-grace-s", "3600") as (
            process,
            address,
        ):
            async with grpc.aio.insecure_channel(address) as channel:
                silent: Any = ServerReflectionStub(channel)
                reflection = silent.ServerReflectionInfo()
                await reflection.write(ServerReflectionRequest(list_services=""))
                assert (await reflection.read()).list_services_response.service
                half = http2.connect(address)
                half.sendall(http2.call(1) + http2.message_that_stops(1))
                with half:
                    assert await end_of(process) == 0
                assert await reflection.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(ask())


@pytest.mark.parametrize("delay", ["0.25", "0"])
def test_where_one_of_two_servers_stops_no_call_fails(
    bundle: Path, tmp_path: Path, picture: Encode, delay: str
) -> None:
    image, logs = picture(), [tmp_path / "first", tmp_path / "second"]

    async def run(first: Process, *addresses: str) -> list[Any]:
        async with contextlib.AsyncExitStack() as clients:
            asks = []
            for _ in range(CONNECTIONS):
                client = AsyncDetectorClient(f"ipv4:{','.join(addresses)}")
                await clients.enter_async_context(client)
                asks += CALLS * [lambda client=client: client.detect(image)]
            async with asking(*asks) as askers:
                await askers.get(40)
                assert await end_of(first) == 0
                await askers.get(40)
            return askers.outcomes

    options = *OPTIONS, "--drain-delay-s", delay
    with (
        server_process(bundle, logs[0], *options) as (first, one),
        server_process(bundle, logs[1], *options) as (_, other),
    ):
        outcomes = asyncio.run(run(first, one, other))
    assert all(isinstance(outcome, Detections) for outcome in outcomes)
    answered = [statuses_in(log).count("OK") for log in logs]
    assert min(answered) > 0
    assert sum(answered) == len(outcomes)

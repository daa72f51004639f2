"""Shutdown of servers under load from several connections."""

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
from in_process_server import OWN_CONNECTION
from server_load import Process, server_process

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.messages import REQUEST_ID_KEY

Encode = Callable[..., bytes]

# No request is rejected for its estimated queue time, however slow the machine is.
OPTIONS = "--max-wait-s", "600", "--log-level", "debug", "--log-format", "json"
CONNECTIONS = 4
CALLS = 2  # concurrent calls per connection


class Load:
    """Outcomes of clients that send requests continuously."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    async def get(self, count: int) -> None:
        """Wait for `count` more outcomes."""
        enough = len(self.outcomes) + count
        async with asyncio.timeout(60):
            while len(self.outcomes) < enough:
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def sending(*sends: Callable[[], Any]) -> AsyncIterator[Load]:
    """Call each function repeatedly within the context."""
    load, is_over = Load(), asyncio.Event()

    async def repeat(send: Callable[[], Any]) -> None:
        while not is_over.is_set():
            load.outcomes.append(await send())

    async with asyncio.TaskGroup() as tasks:
        for send in sends:
            tasks.create_task(repeat(send))
        yield load
        is_over.set()


def statuses_in(log: Path) -> list[str]:
    """Return the logged status of each request."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line["status"] for line in lines if "status" in line]


async def stop(process: Process) -> int:
    process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(process.wait, 60)


@pytest.mark.slow
def test_stopping_server_completes_accepted_requests(
    bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    log, request = tmp_path / "log", pb.DetectRequest(image=picture())

    async def send(stub: Any) -> tuple[grpc.StatusCode, bool]:
        call = stub.Detect(request, timeout=60)
        status, metadata = await call.code(), await call.trailing_metadata()
        if status is not grpc.StatusCode.OK:
            await asyncio.sleep(0.02)
        return status, REQUEST_ID_KEY in dict(metadata or ())

    async def run(process: Process, address: str) -> list[tuple[grpc.StatusCode, bool]]:
        async with contextlib.AsyncExitStack() as channels:
            sends = []
            for _ in range(CONNECTIONS):
                channel = grpc.aio.insecure_channel(address, OWN_CONNECTION)
                stub: Any = DetectorStub(await channels.enter_async_context(channel))
                sends += CALLS * [lambda stub=stub: send(stub)]
            async with sending(*sends) as load:
                await load.get(20)
                assert await stop(process) == 0
                await load.get(20)
            return load.outcomes

    with server_process(bundle, log, *OPTIONS) as server:
        outcomes = asyncio.run(run(*server))
    completed = outcomes.count((grpc.StatusCode.OK, True))
    assert statuses_in(log) == completed * ["OK"]
    # The server has not seen the others. gRPC cancels calls that arrive while it closes.
    others = {outcome for outcome in outcomes if outcome != (grpc.StatusCode.OK, True)}
    assert (grpc.StatusCode.UNAVAILABLE, False) in others
    assert others <= {(grpc.StatusCode.UNAVAILABLE, False), (grpc.StatusCode.CANCELLED, False)}


@pytest.mark.slow
def test_silent_clients_do_not_delay_the_shutdown(bundle: Path, tmp_path: Path) -> None:
    async def run() -> None:
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
                half.sendall(http2.call(1) + http2.incomplete_message(1))
                with half:
                    assert await stop(process) == 0
                assert await reflection.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["0.25", "0"])
def test_no_call_fails_when_one_of_two_servers_stops(
    bundle: Path, tmp_path: Path, picture: Encode, delay: str
) -> None:
    image, logs = picture(), [tmp_path / "first", tmp_path / "second"]

    async def run(first: Process, *addresses: str) -> list[Any]:
        async with contextlib.AsyncExitStack() as clients:
            sends = []
            for _ in range(CONNECTIONS):
                client = AsyncDetectorClient(f"ipv4:{','.join(addresses)}")
                await clients.enter_async_context(client)
                sends += CALLS * [lambda client=client: client.detect(image)]
            async with sending(*sends) as load:
                await load.get(40)
                assert await stop(first) == 0
                await load.get(40)
            return load.outcomes

    options = *OPTIONS, "--drain-delay-s", delay
    with (
        server_process(bundle, logs[0], *options) as (first, one),
        server_process(bundle, logs[1], *options) as (_, other),
    ):
        outcomes = asyncio.run(run(first, one, other))
    assert all(isinstance(outcome, Detections) for outcome in outcomes)
    completed = [statuses_in(log).count("OK") for log in logs]
    assert min(completed) > 0
    assert sum(completed) == len(outcomes)

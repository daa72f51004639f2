"""Shutdown of servers under load from several connections."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import raw_http2 as http2
from gated_engine import Gate
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from in_process_server import connected, served
from server_load import Process, server_process

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import UnreachableError
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
            await asyncio.sleep(0.05)  # leaves CPU time to the servers

    async with asyncio.TaskGroup() as tasks:
        for send in sends:
            tasks.create_task(repeat(send))
        yield load
        is_over.set()


def statuses_in(log: Path) -> list[str]:
    """Return the logged status of each request that was read."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line["status"] for line in lines if "images" in line]


async def stop(process: Process, number: signal.Signals = signal.SIGTERM) -> int:
    process.send_signal(number)
    return await asyncio.to_thread(process.wait, 60)


@contextlib.asynccontextmanager
async def silent_clients(address: str) -> AsyncIterator[Any]:
    """Open a reflection stream and half a request. Yields the stream."""
    async with connected(address, ServerReflectionStub) as stub:
        reflection = stub.ServerReflectionInfo()
        await reflection.write(ServerReflectionRequest(list_services=""))
        assert (await reflection.read()).list_services_response.service
        with http2.connect(address) as half:
            half.sendall(http2.call(1) + http2.incomplete_message(1))
            yield reflection


async def test_requests_that_are_cancelled_at_the_end_are_counted_in_a_warning(
    wide_bundle: Path, gate: Gate, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    gate.open()
    async with served(wide_bundle, stop_grace_s=0.1) as address:
        client, number = AsyncDetectorClient(address, retries=0), gate.count
        gate.close()
        calls = [asyncio.create_task(client.detect(picture())) for _ in range(3)]
        await gate.comes_to(number + 1)
        asyncio.get_running_loop().call_later(1, gate.open)  # else closing the worker takes 10 s
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    await client.close()
    assert {type(outcome) for outcome in outcomes} == {UnreachableError}
    (record,) = (own for own in caplog.records if own.levelname == "WARNING")
    assert re.fullmatch(r"stop_grace_s \(0.1 s\) is over; .* cancelled: [1-3]", record.message)


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", ["0", "2"])
async def test_stopping_server_completes_accepted_requests_and_ignores_silent_clients(
    wide_bundle: Path, tmp_path: Path, picture: Encode, front_ends: str
) -> None:
    log, request = tmp_path / "log", pb.DetectRequest(image=picture())

    async def send(stub: Any) -> tuple[grpc.StatusCode, bool]:
        call = stub.Detect(request, timeout=60)
        status, metadata = await call.code(), await call.trailing_metadata()
        return status, REQUEST_ID_KEY in dict(metadata or ())

    async with contextlib.AsyncExitStack() as stack:
        options = *OPTIONS, "--stop-grace-s", "3600", "--front-ends", front_ends
        running = server_process(wide_bundle, log, *options)
        process, address = stack.enter_context(running)
        reflection = await stack.enter_async_context(silent_clients(address))
        sends = []
        for _ in range(CONNECTIONS):
            stub = await stack.enter_async_context(connected(address))
            sends += CALLS * [lambda stub=stub: send(stub)]
        async with sending(*sends) as load:
            await load.get(20)
            assert await stop(process) == 0
            await load.get(20)
        assert await reflection.code() is grpc.StatusCode.UNAVAILABLE
    completed = load.outcomes.count((grpc.StatusCode.OK, True))
    assert statuses_in(log) == completed * ["OK"]
    # The server has not seen the others. gRPC cancels calls that arrive while it closes.
    others = {outcome for outcome in load.outcomes if outcome != (grpc.StatusCode.OK, True)}
    assert (grpc.StatusCode.UNAVAILABLE, False) in others
    assert others <= {(grpc.StatusCode.UNAVAILABLE, False), (grpc.StatusCode.CANCELLED, False)}


@pytest.mark.slow
async def test_no_call_fails_when_two_of_three_servers_stop(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    image, delays = picture(), ("0.25", "0", "0")
    front_ends = "2", "0", "0"
    logs = [tmp_path / str(number) for number in range(len(delays))]
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            stack.enter_context(
                server_process(
                    wide_bundle, log, *OPTIONS, "--drain-delay-s", delay, "--front-ends", count
                )
            )
            for log, delay, count in zip(logs, delays, front_ends, strict=True)
        ]
        addresses = ",".join(address for _, address in servers)
        sends = []
        for _ in range(CONNECTIONS):
            client = await stack.enter_async_context(AsyncDetectorClient(f"ipv4:{addresses}"))
            sends += CALLS * [lambda client=client: client.detect(image)]
        async with sending(*sends) as load:
            for (process, _), number in zip(servers, (signal.SIGTERM, signal.SIGINT), strict=False):
                await load.get(20)
                assert await stop(process, number) == 0
            await load.get(20)
        assert await stop(servers[2][0]) == 0  # after this, its log is complete
    assert all(isinstance(outcome, Detections) for outcome in load.outcomes)
    completed = [statuses_in(log).count("OK") for log in logs]
    assert min(completed) > 0
    assert sum(completed) == len(load.outcomes)

"""Front ends that are killed, and shutdown and reload of servers with front ends, under load."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from in_process_server import OWN_CONNECTION, connected, gets_detections
from scraped_metrics import metrics_from_log
from server_load import (
    Load,
    Process,
    front_end_pids,
    memory_of,
    server_process,
    wait_until,
)
from triton_requests import MODEL

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.rpc.front_end_server import FrontEndServer

Encode = Callable[..., bytes]

# No request is rejected for its estimated queue time, however slow the machine is.
OPTIONS = "--front-ends", "2", "--max-wait-s", "600", "--metrics-port", "0"
CLIENTS = 8
# Allowed growth of the memory of the server and its front ends.
SPARE_BYTES = 80 << 20


@contextlib.contextmanager
def running(bundle: Path, log: Path, *options: str) -> Iterator[tuple[Process, str]]:
    with server_process(bundle, log, *OPTIONS, *options) as (process, address):
        assert len(front_end_pids(process.pid)) == 2
        yield process, address


def connections_of(pid: int, address: str) -> int:
    """Return the number of clients that are connected to a process."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    tables = (Path("/proc/net", table).read_text() for table in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()]
    return sum(
        row[1].endswith(port) and row[3] == "01" and f"socket:[{row[9]}]" in sockets for row in rows
    )


async def test_a_killed_front_end_loses_only_its_own_connections(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    log, is_over = tmp_path / "log", asyncio.Event()
    request = pb.DetectRequest(image=picture())
    failures: dict[int, grpc.StatusCode] = {}
    completed = dict.fromkeys(range(CLIENTS), 0)

    async def send(stub: Any, client: int) -> None:
        while not is_over.is_set():
            try:
                assert (await stub.Detect(request, timeout=60, wait_for_ready=True)).detections
                completed[client] += 1
            except grpc.RpcError as error:
                failures[client] = error.code()

    async def get_responses() -> None:
        enough = {client: count + 2 for client, count in completed.items()}
        async with asyncio.timeout(60):
            while any(completed[client] < count for client, count in enough.items()):
                await asyncio.sleep(0.02)

    with running(wide_bundle, log) as (process, address):
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for client in range(CLIENTS):
                stub = await stack.enter_async_context(connected(address))
                tasks.create_task(send(stub, client))
            await get_responses()
            killed = max(front_end_pids(process.pid), key=lambda pid: connections_of(pid, address))
            lost = connections_of(killed, address)
            os.kill(killed, signal.SIGKILL)
            await get_responses()
            is_over.set()
        await asyncio.to_thread(wait_until, lambda: len(front_end_pids(process.pid)) == 2)
        assert killed not in front_end_pids(process.pid)
        metrics = metrics_from_log(log.read_text())
        await metrics.becomes(0, "maskrcnn_slots_in_use", model=MODEL)
        for _ in range(CLIENTS):
            assert await gets_detections(address, picture())
    assert 0 < len(failures) <= lost
    assert set(failures.values()) == {grpc.StatusCode.UNAVAILABLE}
    assert f"front end {killed} ended: Killed" in log.read_text()


async def test_front_end_that_cannot_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    new_front_end, errors = FrontEndServer._new_front_end, [OSError("no more processes")]

    def fail_once(server: FrontEndServer) -> Any:
        if errors:
            raise errors.pop()
        return new_front_end(server)

    server = FrontEndServer(1, ServeConfig(port=0), None, [])
    await server.start()
    monkeypatch.setattr(FrontEndServer, "_new_front_end", fail_once)
    (killed,) = front_end_pids(os.getpid())
    os.kill(killed, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: front_end_pids(os.getpid()) - {killed})
    await server.stop()
    assert "cannot start a front-end process: no more processes" in caplog.text


@pytest.mark.slow
def test_reload_and_stop_under_load(wide_bundle: Path, tmp_path: Path, picture: Encode) -> None:
    log = tmp_path / "log"
    with (
        running(wide_bundle, log, "--drain-delay-s", "2") as (process, address),
        contextlib.ExitStack() as stack,
    ):
        channels = [
            stack.enter_context(grpc.insecure_channel(address, OWN_CONNECTION)) for _ in range(6)
        ]
        loads = [
            stack.enter_context(Load(DetectorStub(channel), picture(), ("fp32",)))
            for channel in channels
        ]
        health = HealthStub(channels[0]).Watch(HealthCheckRequest(), timeout=60)
        assert next(health).status == HealthCheckResponse.SERVING
        for pid in front_end_pids(process.pid):  # as Ctrl+C in a terminal does
            os.kill(pid, signal.SIGINT)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reloaded" in log.read_text())
        for load in loads:
            load.wait_for_responses(2)
        process.send_signal(signal.SIGTERM)
        assert next(health).status == HealthCheckResponse.NOT_SERVING
        for load in loads:
            load.stop()
        assert process.wait(60) == 0
        assert [failure for load in loads for failure in load.failures] == []
    assert "Traceback" not in log.read_text()


def test_front_ends_end_with_a_killed_server(wide_bundle: Path, tmp_path: Path) -> None:
    with running(wide_bundle, tmp_path / "log") as (process, _):
        pids = front_end_pids(process.pid)
        process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))


async def test_unread_responses_of_a_stream_stop_its_requests(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    image = picture() + bytes(100_000)
    request = pb.DetectRequest(image=image, mask_format=pb.MASK_FORMAT_PROBABILITIES)
    options = [("grpc.http2.bdp_probe", 0)]  # receive 64 KiB of responses in advance
    with running(wide_bundle, tmp_path / "log") as (process, address):
        pids = process.pid, *front_end_pids(process.pid)
        before = sum(map(memory_of, pids))
        async with grpc.aio.insecure_channel(address, options) as channel:
            stream = DetectorStub(channel).DetectStream()
            written = 0
            with contextlib.suppress(TimeoutError):
                while written < 5000:
                    await asyncio.wait_for(stream.write(request), 1)
                    written += 1
            assert written < 5000
            assert sum(map(memory_of, pids)) < before + SPARE_BYTES

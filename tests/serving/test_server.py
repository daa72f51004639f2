import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.errors import BackendError, ServingError
from maskrcnn_trt.serving.rpc.health import LIVENESS
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]
Process = subprocess.Popen[str]


@pytest.fixture
def server_process(bundle: Path) -> Iterator[tuple[Process, str]]:
    """Start a server that waits half a second for each batch. Yields process and address."""
    command = [sys.executable, "-m", "maskrcnn_trt", "serve", str(bundle), "--port", "0"]
    options = ["--max-batch", "64", "--max-delay-ms", "500"]
    with subprocess.Popen(
        command + options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"Ready at (\S+:\d+)", line)
        assert match, line
        yield process, match[1]
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_stops_the_server(
    server_process: tuple[Process, str], picture: Encode, number: signal.Signals
) -> None:
    process, address = server_process
    with grpc.insecure_channel(address) as channel:
        stub: Any = DetectorStub(channel)
        calls = [
            stub.Detect.future(pb.DetectRequest(image=picture(i)), timeout=60) for i in range(6)
        ]
        health = HealthStub(channel).Watch(HealthCheckRequest(service=""), timeout=60)
        assert next(health).status == HealthCheckResponse.SERVING
        process.send_signal(number)
        assert [response.status for response in health] == [HealthCheckResponse.NOT_SERVING]
        assert all(call.result().detections for call in calls)
        assert process.wait(timeout=20) == 0
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_signal_drains_and_ends_an_open_stream(
    server_process: tuple[Process, str], picture: Encode
) -> None:
    process, address = server_process
    hold = threading.Event()

    def requests() -> Iterator[pb.DetectRequest]:
        for index in range(3):
            yield pb.DetectRequest(id=str(index), image=picture(index))
        hold.wait(60)

    with grpc.insecure_channel(address) as channel:
        stub: Any = DetectorStub(channel)
        responses = stub.DetectStream(requests(), timeout=60)
        assert next(responses).response.detections
        process.send_signal(signal.SIGTERM)
        assert {response.id for response in (next(responses), next(responses))} <= {"0", "1", "2"}
        with pytest.raises(grpc.RpcError) as caught:
            next(responses)
        hold.set()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert process.wait(timeout=30) == 0


def test_cancelled_calls_release_their_slots(bundle: Path, picture: Encode) -> None:
    async def run() -> int:
        config = ServeConfig(port=0, queue_size=6, max_batch=64, max_delay_ms=300)
        async with (
            detection_server(bundle, config) as address,
            AsyncDetectorClient(address) as client,
        ):
            calls = [asyncio.create_task(client.detect(picture(i))) for i in range(3)]
            await asyncio.sleep(0.15)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            outcomes = [o async for o in client.detect_many([picture(i) for i in range(2)])]
            return sum(len(outcome) for outcome in outcomes if not isinstance(outcome, Exception))

    assert asyncio.run(run()) > 0


def test_more_requests_than_slots_are_rejected(bundle: Path, picture: Encode) -> None:
    async def run() -> list[Any]:
        config = ServeConfig(port=0, queue_size=6, max_batch=64, max_delay_ms=1000)
        async with (
            detection_server(bundle, config) as address,
            AsyncDetectorClient(address, retries=0) as client,
        ):
            images = [picture(i) for i in range(8)]
            return [o async for o in client.detect_many(images, concurrency=8)]

    outcomes = asyncio.run(run())
    rejected = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert 1 <= len(rejected) <= 5
    assert {error.code for error in rejected} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_failed_warm_up_raises_a_single_error(bundle: Path, gate: Gate) -> None:
    gate.break_with(BackendError("the runtime does not compute"))

    async def start() -> None:
        async with detection_server(bundle, ServeConfig(port=0)):
            pass

    with pytest.raises(BackendError, match="does not compute"):
        asyncio.run(start())


def test_liveness_before_ready_and_after_stop(bundle: Path, gate: Gate) -> None:
    liveness = HealthCheckRequest(service=LIVENESS)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as server:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            gate.close()
            started = detection_server(bundle, ServeConfig(port=port, drain_delay_s=0))
            starting = asyncio.create_task(server.enter_async_context(started))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                health: Any = HealthStub(channel)
                response = await health.Check(liveness, wait_for_ready=True)
                assert response.status == HealthCheckResponse.SERVING
                response = await health.Check(HealthCheckRequest())
                assert response.status == HealthCheckResponse.NOT_SERVING
                watch = health.Watch(liveness)
                assert (await watch.read()).status == HealthCheckResponse.SERVING
                gate.open()
                await starting
                await server.aclose()
                assert await watch.read() is grpc.aio.EOF

    asyncio.run(run())


def test_garbage_collector_ignores_objects_of_a_ready_server(bundle: Path) -> None:
    program = (
        "import asyncio, gc, os, pathlib, signal\n"
        "from maskrcnn_trt.serving.config import ServeConfig\n"
        "from maskrcnn_trt.serving.server import serve\n"
        "def stop(address):\n"
        "    print(gc.get_freeze_count(), len(gc.get_objects()))\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"bundle = pathlib.Path({str(bundle)!r})\n"
        "asyncio.run(serve(bundle, ServeConfig(port=0, drain_delay_s=0), stop))\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    frozen, tracked = map(int, printed.stdout.split())
    assert tracked < frozen / 10


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_host_with_and_without_brackets(bundle: Path, picture: Encode, host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    config = ServeConfig(host=host, port=0, metrics_port=0, drain_delay_s=0)

    async def run() -> Any:
        async with detection_server(bundle, config) as address:
            assert address.startswith("[::1]:")
            async with AsyncDetectorClient(address) as client:
                return await client.detect(picture())

    assert len(asyncio.run(run()))


def test_port_in_use(bundle: Path) -> None:
    async def start(port: int) -> None:
        async with detection_server(bundle, ServeConfig(port=port)):
            pass

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServingError, match=r"cannot listen on 127.0.0.1:.*a free port"):
            asyncio.run(start(taken.getsockname()[1]))

import asyncio
import contextlib
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
from in_process_server import connected, served, served_in_thread
from server_load import server_process

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.errors import BackendError, ServingError
from maskrcnn_trt.serving.pipeline.served_model import ServedModel
from maskrcnn_trt.serving.rpc.listener import check_ports
from maskrcnn_trt.serving.rpc.services import LIVENESS
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]


def test_sigterm_drains_calls_and_ends_an_open_stream(
    wide_bundle: Path, picture: Encode, tmp_path: Path
) -> None:
    log, hold = tmp_path / "log", threading.Event()

    def requests() -> Iterator[pb.DetectRequest]:
        for index in range(3):
            yield pb.DetectRequest(id=str(index), image=picture(index))
        hold.wait(60)

    # The server waits half a second for each batch.
    options = "--max-batch", "64", "--max-delay-ms", "500"
    with (
        server_process(wide_bundle, log, *options) as (process, address),
        grpc.insecure_channel(address) as channel,
    ):
        stub: Any = DetectorStub(channel)
        health = HealthStub(channel).Watch(HealthCheckRequest(service=""), timeout=60)
        assert next(health).status == HealthCheckResponse.SERVING
        stream = stub.DetectStream(requests(), timeout=60)
        assert next(stream).response.detections
        calls = [
            stub.Detect.future(pb.DetectRequest(image=picture(i)), timeout=60) for i in range(6)
        ]
        process.send_signal(signal.SIGTERM)
        assert [response.status for response in health] == [HealthCheckResponse.NOT_SERVING]
        assert {response.id for response in (next(stream), next(stream))} <= {"0", "1", "2"}
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        hold.set()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert all(call.result().detections for call in calls)
        assert process.wait(timeout=60) == 0
    assert "Traceback" not in log.read_text()


async def test_failed_warm_up_raises_a_single_error(wide_bundle: Path, gate: Gate) -> None:
    gate.break_with(BackendError("the runtime does not compute"))
    with pytest.raises(BackendError, match="does not compute"):
        async with served(wide_bundle):
            pass


async def test_liveness_before_ready_and_after_stop(wide_bundle: Path, gate: Gate) -> None:
    liveness = HealthCheckRequest(service=LIVENESS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async with contextlib.AsyncExitStack() as server:
        gate.close()
        started = detection_server(wide_bundle, ServeConfig(port=port, drain_delay_s=0))
        starting = asyncio.create_task(server.enter_async_context(started))
        async with connected(f"127.0.0.1:{port}", HealthStub) as health:
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


def test_garbage_collector_ignores_objects_of_a_ready_server(wide_bundle: Path) -> None:
    program = (
        "import asyncio, gc, os, pathlib, signal\n"
        "from maskrcnn_trt.serving.config import ServeConfig\n"
        "from maskrcnn_trt.serving.server import serve\n"
        "def stop(address):\n"
        "    print(gc.get_freeze_count(), len(gc.get_objects()))\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"bundle = pathlib.Path({str(wide_bundle)!r})\n"
        "asyncio.run(serve(bundle, ServeConfig(port=0, drain_delay_s=0), stop))\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    frozen, tracked = map(int, printed.stdout.split())
    assert tracked < frozen / 10


@pytest.fixture
def ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")


@pytest.mark.usefixtures("ipv6")
def test_ipv6_host(wide_bundle: Path, picture: Encode) -> None:
    assert ServeConfig(host="::1") == ServeConfig(host="[::1]")
    with (
        served_in_thread(wide_bundle, host="::1", metrics_port=0) as address,
        DetectorClient(address) as client,
    ):
        assert address.startswith("[::1]:")
        assert len(client.detect(picture()))


@pytest.mark.usefixtures("ipv6")
def test_host_name_with_an_ipv6_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    check_ports(ServeConfig(host="six.test", port=0, http_port=0))


async def test_ports_in_use(wide_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ServedModel, "load")  # the model is not loaded before the check
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for settings, error in (
            (
                {"port": port},
                r"cannot listen on \S+ for port \(Address already in use\); .*free port",
            ),
            (
                {"host": "no.such.host"},
                r"cannot listen on no\.such\.host:8500 for port \([\w ]+\);",
            ),
            (
                {"host": "a..b"},
                r"cannot listen on a\.\.b:8500 for port \('a\.\.b' is not a host name\)",
            ),
            ({"port": 0, "http_port": port}, r"cannot listen on 127.0.0.1:\d+ for http"),
            ({"port": 0, "metrics_port": port}, r"cannot listen on 127.0.0.1:\d+ for metrics"),
        ):
            with pytest.raises(ServingError, match=error):
                async with detection_server(wide_bundle, ServeConfig(**settings)):
                    pass


async def test_a_crash_of_the_grpc_server_ends_the_process(
    wide_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    create_task = loop.create_task

    def fail_on_a_call(coroutine: Any, **options: Any) -> Any:
        if (
            getattr(coroutine, "__qualname__", "") == "_schedule_rpc_coro"
        ):  # started by the server's main loop
            coroutine.close()
            raise MemoryError
        return create_task(coroutine, **options)

    async def serve() -> None:
        async with served(wide_bundle) as address, connected(address) as stub:
            monkeypatch.setattr(loop, "create_task", fail_on_a_call)
            with contextlib.suppress(grpc.RpcError):
                await stub.GetModel(pb.GetModelRequest())
            await asyncio.sleep(60)

    with pytest.raises(ExceptionGroup) as caught:
        await serve()
    assert caught.group_contains(MemoryError)

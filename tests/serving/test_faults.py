"""Rejected, cancelled, expired and failed requests. A gate holds batches before the model."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import in_process_server
import pytest
from gated_engine import Gate
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from in_process_server import connected, status_of
from scraped_metrics import metrics_from_log

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.errors import BackendError
from maskrcnn_trt.serving.rpc.health import LIVENESS

Encode = Callable[..., bytes]


# Batches of one image.
served = partial(in_process_server.served, max_batch=1, stop_grace_s=30)


@pytest.mark.parametrize(
    "method",
    ["/maskrcnn.v1.Detector/Detect", "/inference.GRPCInferenceService/ModelInfer"],
)
def test_request_without_a_slot_is_rejected_before_it_arrives(
    bundle: Path, gate: Gate, picture: Encode, method: str
) -> None:
    never = asyncio.Event()

    async def no_message() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async def run() -> None:
        async with (
            served(bundle, queue_size=1) as address,
            connected(address) as stub,
            connected(address, lambda channel: channel) as channel,
        ):
            warm = gate.count
            gate.close()
            first = stub.Detect(pb.DetectRequest(image=picture()))
            await gate.comes_to(warm + 1)
            late = channel.stream_unary(method)(no_message())
            status, message = await status_of(late)
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "0 are free" in message
            gate.open()
            assert len((await first).detections)

    asyncio.run(run())


def test_cancelled_requests_in_the_queue_are_not_computed(
    bundle: Path, gate: Gate, picture: Encode
) -> None:
    async def run() -> None:
        async with served(bundle) as address, connected(address) as stub:
            warm = gate.count
            gate.close()
            first = stub.Detect(pb.DetectRequest(image=picture()))
            await gate.comes_to(warm + 1)
            late = stub.Detect(pb.DetectRequest(image=picture(), timeout_us=200_000))
            impatient = stub.Detect(pb.DetectRequest(image=picture()), timeout=0.2)
            cancelled = stub.Detect(pb.DetectRequest(image=picture()))
            status, message = await status_of(late)
            assert status is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "0.2 s" in message
            assert "timeout_us" in message
            assert (await status_of(impatient))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            cancelled.cancel()
            last = stub.Detect(pb.DetectRequest(image=picture()))
            gate.open()
            assert (await first).detections
            assert (await last).detections
            assert gate.count == warm + 2

    asyncio.run(run())


@pytest.mark.parametrize("end", ["cancelled", "expired", "disconnected"])
def test_cancelled_requests_in_the_model_release_their_slot(
    bundle: Path, gate: Gate, picture: Encode, end: str
) -> None:
    async def run() -> None:
        async with (
            served(bundle, queue_size=1, timeout_s=2.0 if end == "expired" else None) as address,
            connected(address) as stub,
        ):
            warm = gate.count
            gate.close()
            async with connected(address) as other:
                call = other.Detect(pb.DetectRequest(image=picture()))
                await gate.comes_to(warm + 1)
                refused = stub.Detect(pb.DetectRequest(image=picture()))
                assert (await status_of(refused))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
                if end == "cancelled":
                    call.cancel()
                if end == "expired":
                    assert (await status_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            while True:  # until the server has noticed
                accepted = stub.Detect(pb.DetectRequest(image=picture()))
                await asyncio.wait([asyncio.ensure_future(accepted.code())], timeout=0.1)
                if not accepted.done():
                    break
            gate.open()
            assert (await accepted).detections

    asyncio.run(run())


def test_busy_client_does_not_block_another(
    bundle: Path, gate: Gate, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    order: list[str] = []

    async def send(stub: Any, name: str) -> None:
        with contextlib.suppress(grpc.RpcError):
            await stub.Detect(pb.DetectRequest(image=picture()))
            order.append(name)

    async def run() -> None:
        async with (
            served(bundle, queue_size=16, metrics_port=0) as address,
            connected(address) as greedy,
            connected(address) as modest,
            asyncio.TaskGroup() as tasks,
        ):
            metrics, warm = metrics_from_log(caplog.text), gate.count
            gate.close()
            for _ in range(40):
                tasks.create_task(send(greedy, "greedy"))
            await gate.comes_to(warm + 1)
            await metrics.becomes(26, "maskrcnn_rejected_total", reason="queue_full")
            tasks.create_task(send(modest, "modest"))
            await metrics.becomes(15, "maskrcnn_requests_in_progress")
            gate.open()

    asyncio.run(run())
    assert len(order) == 15
    assert "modest" in order[:3]


@pytest.mark.parametrize("fault", [RuntimeError("no"), BackendError("no"), SystemExit()])
def test_failed_backend_is_restarted(
    bundle: Path, gate: Gate, picture: Encode, fault: BaseException
) -> None:
    async def run() -> None:
        async with (
            served(bundle) as address,
            connected(address) as stub,
            connected(address, HealthStub) as health,
        ):
            watch = health.Watch(HealthCheckRequest())
            assert (await watch.read()).status == HealthCheckResponse.SERVING

            async def status() -> grpc.StatusCode:
                return (await status_of(stub.Detect(pb.DetectRequest(image=picture()))))[0]

            for faulty in (True, True, False, True, True):  # never three failures in a row
                gate.break_with(fault if faulty else None)
                expected = grpc.StatusCode.INTERNAL if faulty else grpc.StatusCode.OK
                assert await status() is expected
            assert await status() is grpc.StatusCode.INTERNAL
            gate.close()  # delays the new worker process
            assert await status() is grpc.StatusCode.UNAVAILABLE
            assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
            alive = await health.Check(HealthCheckRequest(service=LIVENESS))
            assert alive.status == HealthCheckResponse.SERVING
            gate.break_with(None)
            gate.open()
            assert (await watch.read()).status == HealthCheckResponse.SERVING
            assert await status() is grpc.StatusCode.OK

    asyncio.run(run())


def test_failing_restart_is_retried(bundle: Path, gate: Gate, picture: Encode) -> None:
    async def run() -> None:
        async with served(bundle) as address, connected(address) as stub:
            gate.break_with(RuntimeError("no memory"))
            for _ in range(3):
                await status_of(stub.Detect(pb.DetectRequest(image=picture())))
            await gate.comes_to(gate.count + 1)
            gate.break_with(None)
            start = time.monotonic()
            while time.monotonic() < start + 60:
                call = stub.Detect(pb.DetectRequest(image=picture()))
                if (await status_of(call))[0] is grpc.StatusCode.OK:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("the backend did not recover")

    asyncio.run(run())

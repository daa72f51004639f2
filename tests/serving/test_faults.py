"""Rejected, cancelled, expired and failed requests. A gate holds batches before the model."""

import asyncio
import contextlib
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
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.errors import BackendError
from maskrcnn_trt.serving.rpc.services import LIVENESS

Encode = Callable[..., bytes]


DETECT, INFER = "/maskrcnn.v1.Detector/Detect", "/inference.GRPCInferenceService/ModelInfer"

# Batches of one image.
served = partial(in_process_server.served, max_batch=1, stop_grace_s=30)


async def no_message() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_cancelled_requests_in_the_queue_are_not_computed(
    wide_bundle: Path, gate: Gate, picture: Encode
) -> None:
    async with served(wide_bundle) as address, connected(address) as stub:
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


@pytest.mark.parametrize("ends", [["cancelled", "disconnected"], ["expired"]])
async def test_slot_is_free_after_its_request_in_the_model_is_cancelled(
    wide_bundle: Path, gate: Gate, picture: Encode, ends: list[str]
) -> None:
    request = pb.DetectRequest(image=picture())

    async def check(address: str, end: str) -> None:
        number = gate.count
        gate.close()
        async with connected(address, lambda channel: channel) as channel:
            stub: Any = DetectorStub(channel)
            async with connected(address) as other:
                call = other.Detect(request)
                await gate.comes_to(number + 1)
                for method in (DETECT, INFER):  # rejected before its message arrives
                    refused = channel.stream_unary(method)(no_message())
                    status, message = await status_of(refused)
                    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert "1 of 1 admission slots" in message
                if end == "cancelled":
                    call.cancel()
                if end == "expired":
                    assert (await status_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            while True:  # until the server has noticed
                accepted = stub.Detect(request)
                await asyncio.wait([asyncio.ensure_future(accepted.code())], timeout=0.1)
                if not accepted.done():
                    break
            gate.open()
            assert (await accepted).detections

    limit_s = 2.0 if ends == ["expired"] else None
    async with served(wide_bundle, queue_size=1, timeout_s=limit_s) as address:
        for end in ends:
            await check(address, end)


async def test_busy_client_does_not_block_another(
    wide_bundle: Path, gate: Gate, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    order: list[str] = []

    async def send(stub: Any, name: str) -> None:
        with contextlib.suppress(grpc.RpcError):
            await stub.Detect(pb.DetectRequest(image=picture()))
            order.append(name)

    async with (
        served(wide_bundle, queue_size=16, max_batch=2, metrics_port=0) as address,
        connected(address) as greedy,
        connected(address) as modest,
        asyncio.TaskGroup() as tasks,
    ):
        metrics, warm = metrics_from_log(caplog.text), gate.count
        gate.close()
        for _ in range(40):
            tasks.create_task(send(greedy, "greedy"))
        await gate.comes_to(warm + 1)
        await metrics.becomes(24, "maskrcnn_rejected_total", reason="queue_full")
        tasks.create_task(send(modest, "modest"))
        await metrics.becomes(17, "maskrcnn_requests_in_progress")
        gate.open()
    assert len(order) == 17
    # It waits for one slot, and for the batches that were formed before.
    assert "modest" in order[:8]


async def test_failed_backend_is_restarted(wide_bundle: Path, gate: Gate, picture: Encode) -> None:
    async with (
        served(wide_bundle) as address,
        connected(address) as stub,
        connected(address, HealthStub) as health,
    ):
        watch = health.Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING

        async def status() -> grpc.StatusCode:
            return (await status_of(stub.Detect(pb.DetectRequest(image=picture()))))[0]

        # Never three failures in a row, until the last one.
        no, unfit, end = RuntimeError("no"), BackendError("no"), SystemExit()
        for fault in (no, unfit, None, unfit, end, None, end, no, end):
            gate.break_with(fault)
            expected = grpc.StatusCode.INTERNAL if fault else grpc.StatusCode.OK
            assert await status() is expected
        gate.close()  # delays the new worker process
        assert await status() is grpc.StatusCode.UNAVAILABLE
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        alive = await health.Check(HealthCheckRequest(service=LIVENESS))
        assert alive.status == HealthCheckResponse.SERVING
        gate.break_with(None)
        gate.open()
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        assert await status() is grpc.StatusCode.OK


async def test_failing_restart_is_retried(wide_bundle: Path, gate: Gate, picture: Encode) -> None:
    async with served(wide_bundle) as address, connected(address) as stub:
        gate.break_with(RuntimeError("no memory"))
        for _ in range(3):
            await status_of(stub.Detect(pb.DetectRequest(image=picture())))
        await gate.comes_to(gate.count + 1)
        gate.break_with(None)
        async with asyncio.timeout(60):
            while True:
                call = stub.Detect(pb.DetectRequest(image=picture()))
                if (await status_of(call))[0] is grpc.StatusCode.OK:
                    return
                await asyncio.sleep(0.05)

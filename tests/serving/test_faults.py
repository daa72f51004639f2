"""What goes wrong around a request, over real sockets; a gate holds batches before the model."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from scraped_metrics import metrics_in

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.errors import BackendError
from maskrcnn_trt.serving.server import detection_server
from maskrcnn_trt.serving.transport.health import LIVENESS

Encode = Callable[..., bytes]


@contextlib.asynccontextmanager
async def served(bundle: Path, **settings: Any) -> AsyncIterator[str]:
    """The address of a server that computes image by image."""
    config = ServeConfig(port=0, max_batch=1, max_delay_ms=0, drain_delay_s=0, **settings)
    async with detection_server(bundle, config) as address:
        yield address


@contextlib.asynccontextmanager
async def connected(
    address: str, stub: Callable[[grpc.aio.Channel], Any] = DetectorStub
) -> AsyncIterator[Any]:
    """A stub with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield stub(channel)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details() or ""


@pytest.mark.parametrize(
    "method",
    ["/maskrcnn.v1.Detector/Detect", "/inference.GRPCInferenceService/ModelInfer"],
)
def test_what_finds_no_place_is_refused_before_it_comes(
    bundle: Path, gate: Gate, picture: Encode, method: str
) -> None:
    never = asyncio.Event()

    async def no_message() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async def ask() -> None:
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

    asyncio.run(ask())


def test_what_is_given_up_in_the_queue_is_never_computed(
    bundle: Path, gate: Gate, picture: Encode
) -> None:
    async def ask() -> None:
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
            assert message.startswith("the request took longer than its 0.2 s; ask for more with")
            assert (await status_of(impatient))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            cancelled.cancel()
            last = stub.Detect(pb.DetectRequest(image=picture()))
            gate.open()
            assert (await first).detections
            assert (await last).detections
            assert gate.count == warm + 2

    asyncio.run(ask())


@pytest.mark.parametrize("way", ["cancelled", "expired", "gone"])
def test_what_is_given_up_at_the_model_frees_its_place(
    bundle: Path, gate: Gate, picture: Encode, way: str
) -> None:
    async def ask() -> None:
        async with (
            served(bundle, queue_size=1, timeout_s=2.0 if way == "expired" else None) as address,
            connected(address) as stub,
        ):
            warm = gate.count
            gate.close()
            async with connected(address) as other:
                call = other.Detect(pb.DetectRequest(image=picture()))
                await gate.comes_to(warm + 1)
                refused = stub.Detect(pb.DetectRequest(image=picture()))
                assert (await status_of(refused))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
                if way == "cancelled":
                    call.cancel()
                if way == "expired":
                    assert (await status_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            while True:  # until the server has heard of it
                accepted = stub.Detect(pb.DetectRequest(image=picture()))
                await asyncio.wait([asyncio.ensure_future(accepted.code())], timeout=0.1)
                if not accepted.done():
                    break
            gate.open()
            assert (await accepted).detections

    asyncio.run(ask())


def test_a_client_with_many_requests_does_not_shut_another_out(
    bundle: Path, gate: Gate, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    order: list[str] = []

    async def ask(stub: Any, name: str) -> None:
        with contextlib.suppress(grpc.RpcError):
            await stub.Detect(pb.DetectRequest(image=picture()))
            order.append(name)

    async def ask_both() -> None:
        async with (
            served(bundle, queue_size=16, metrics_port=0) as address,
            connected(address) as greedy,
            connected(address) as modest,
            asyncio.TaskGroup() as tasks,
        ):
            metrics, warm = metrics_in(caplog.text), gate.count
            gate.close()
            for _ in range(40):
                tasks.create_task(ask(greedy, "greedy"))
            await gate.comes_to(warm + 1)
            await metrics.becomes(26, "maskrcnn_rejected_total", reason="queue_full")
            tasks.create_task(ask(modest, "modest"))
            await metrics.becomes(15, "maskrcnn_requests_in_progress")
            gate.open()

    asyncio.run(ask_both())
    assert len(order) == 15
    assert "modest" in order[:3]


@pytest.mark.parametrize("fault", [RuntimeError("no"), BackendError("no"), SystemExit()])
def test_a_backend_that_breaks_is_loaded_again(
    bundle: Path, gate: Gate, picture: Encode, fault: BaseException
) -> None:
    async def ask() -> None:
        async with (
            served(bundle) as address,
            connected(address) as stub,
            connected(address, HealthStub) as health,
        ):
            watch = health.Watch(HealthCheckRequest())
            assert (await watch.read()).status == HealthCheckResponse.SERVING

            async def status() -> grpc.StatusCode:
                return (await status_of(stub.Detect(pb.DetectRequest(image=picture()))))[0]

            for faulty in (True, True, False, True, True):  # never three in a row
                gate.break_with(fault if faulty else None)
                expected = grpc.StatusCode.INTERNAL if faulty else grpc.StatusCode.OK
                assert await status() is expected
            assert await status() is grpc.StatusCode.INTERNAL
            gate.close()  # for the new one to take its time
            assert await status() is grpc.StatusCode.UNAVAILABLE
            assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
            alive = await health.Check(HealthCheckRequest(service=LIVENESS))
            assert alive.status == HealthCheckResponse.SERVING
            gate.break_with(None)
            gate.open()
            assert (await watch.read()).status == HealthCheckResponse.SERVING
            assert await status() is grpc.StatusCode.OK

    asyncio.run(ask())


def test_a_backend_that_stays_broken_is_tried_again(
    bundle: Path, gate: Gate, picture: Encode
) -> None:
    async def ask() -> None:
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
            raise AssertionError("the backend did not come back")

    asyncio.run(ask())

"""Order and batches of requests that are queued while the model is busy."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gated_engine import Gate
from in_process_server import connected, served
from scraped_metrics import Metrics, metrics_from_log
from triton_requests import MODEL

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb

Encode = Callable[..., bytes]


class BusyServer(NamedTuple):
    """Server whose model is blocked by a first request."""

    detector: Any
    metrics: Metrics
    first: Any

    async def queues(self, number: int) -> None:
        name = "nv_inference_pending_request_count"
        await self.metrics.becomes(number, name, model=MODEL, version="1")


@contextlib.asynccontextmanager
async def busy_server(
    bundle: Path, gate: Gate, log: pytest.LogCaptureFixture, image: bytes, **settings: Any
) -> AsyncIterator[BusyServer]:
    log.set_level("INFO")
    async with (
        served(bundle, metrics_port=0, **settings) as address,
        connected(address) as stub,
    ):
        warm = gate.count
        gate.close()
        first = stub.Detect(pb.DetectRequest(image=image))
        await gate.comes_to(warm + 1)
        yield BusyServer(stub, metrics_from_log(log.text), first)


async def test_urgent_requests_are_computed_first(
    bundle: Path, gate: Gate, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    completed: asyncio.Queue[int] = asyncio.Queue()

    async def detect(server: BusyServer, priority: int) -> None:
        request = pb.DetectRequest(image=picture(), priority=priority)
        assert (await server.detector.Detect(request)).detections
        completed.put_nowait(priority)

    async with (
        busy_server(bundle, gate, caplog, picture(), max_batch=1, max_delay_ms=2) as server,
        asyncio.TaskGroup() as tasks,
    ):
        for number, priority in enumerate((3, 3, 2, 1), start=1):
            tasks.create_task(detect(server, priority))
            await server.queues(number)
        gate.admit_one()
        await server.first
        # One image at a time, because the masks of two images are encoded in parallel.
        for priority in (1, 2, 3, 3):
            gate.admit_one()
            assert await completed.get() == priority


@pytest.mark.parametrize(("preferred", "sizes"), [((), [5, 5, 5, 5, 5]), ((2, 4), [1, 4, 4, 4, 4])])
async def test_preferred_batch_sizes_do_not_wait(
    bundle: Path,
    gate: Gate,
    picture: Encode,
    caplog: pytest.LogCaptureFixture,
    preferred: tuple[int, ...],
    sizes: list[int],
) -> None:
    settings = {"max_batch": 8, "max_delay_ms": 1000, "preferred_batch": preferred}
    async with busy_server(bundle, gate, caplog, picture(), **settings) as server:
        request = pb.DetectRequest(image=picture())
        calls = [server.detector.Detect(request) for _ in range(5)]
        await server.queues(5)
        gate.open()
        assert (await server.first).detections
        assert sorted([(await call).timing.batch_size for call in calls]) == sizes

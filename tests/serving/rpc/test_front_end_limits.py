"""Limits and metrics of a server apply to all of its front ends together."""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from in_process_server import connected, served
from scraped_metrics import metrics_from_log
from triton_requests import MODEL

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.errors import ServingError
from maskrcnn_trt.serving.rpc import front_end_server
from maskrcnn_trt.serving.rpc.front_end_server import FrontEndServer, front_end_count

Encode = Callable[..., bytes]

# So many that each front end has some.
CLIENTS = 16


@contextlib.asynccontextmanager
async def clients(address: str) -> AsyncIterator[list[Any]]:
    """Connect clients with connections of their own."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(connected(address)) for _ in range(CLIENTS)]
        for stub in stubs:
            await stub.GetModel(pb.GetModelRequest())
        yield stubs


async def test_slots_and_metrics_count_all_connections(
    wide_bundle: Path, gate: Gate, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "maskrcnn_trt")
    request = pb.DetectRequest(image=picture())
    settings = {"front_ends": 2, "queue_size": 4, "max_wait_s": 600, "metrics_port": 0}
    async with served(wide_bundle, **settings) as address, clients(address) as stubs:
        metrics = metrics_from_log(caplog.text)
        port = {"port": address.rpartition(":")[2]}
        # A client of an earlier test may still try to reconnect to a port of the same number.
        await metrics.becomes(CLIENTS, "maskrcnn_connections", **port)
        gate.close()
        calls = [stub.Detect(request, timeout=60) for stub in stubs]
        ended = itertools.islice(asyncio.as_completed([call.code() for call in calls]), CLIENTS - 4)
        for code in ended:
            assert await code is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Calls are rejected as they open; the others may not have been read yet.
        await metrics.becomes(4, "maskrcnn_slots_in_use", model=MODEL)
        gate.open()
        codes = Counter(await asyncio.gather(*(call.code() for call in calls)))
        assert codes[grpc.StatusCode.OK] == 4
        success = "nv_inference_request_success"
        assert await metrics.value(success, model=MODEL, version="1") == 4
        await metrics.becomes(0, "maskrcnn_slots_in_use", model=MODEL)


async def test_rate_limit_counts_all_connections(wide_bundle: Path, picture: Encode) -> None:
    request = pb.DetectRequest(image=picture())
    settings = {"front_ends": 2, "max_requests_per_s": 0.001}
    async with served(wide_bundle, **settings) as address, clients(address) as stubs:
        calls = [stub.Detect(request, timeout=60) for stub in stubs]
        codes = Counter(await asyncio.gather(*(call.code() for call in calls)))
    assert codes == {grpc.StatusCode.OK: 1, grpc.StatusCode.RESOURCE_EXHAUSTED: CLIENTS - 1}


async def test_two_servers_do_not_share_a_port() -> None:
    first = FrontEndServer(1, ServeConfig(port=0), None, [])
    with pytest.raises(ServingError, match="cannot listen on"):
        FrontEndServer(1, ServeConfig(port=first.port), None, [])
    await first.stop()
    await FrontEndServer(1, ServeConfig(port=first.port), None, []).stop()


@pytest.mark.parametrize(("gpus", "count"), [(0, 0), (1, 0), (2, 2), (4, 4)])
def test_one_front_end_per_gpu_of_several(
    monkeypatch: pytest.MonkeyPatch, gpus: int, count: int
) -> None:
    names = [str(index) for index in range(gpus)]
    monkeypatch.setattr(front_end_server, "visible_gpus", lambda: names)
    assert front_end_count(ServeConfig()) == count
    assert front_end_count(ServeConfig(front_ends=0)) == 0
    assert front_end_count(ServeConfig(front_ends=3)) == 3

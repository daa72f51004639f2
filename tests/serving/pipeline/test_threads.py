"""Fair thread pool, alone and in a server."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.pipeline.threads import FairThreadPool
from maskrcnn_trt.serving.server import detection_server


@pytest.fixture
def threads() -> Iterator[FairThreadPool]:
    one = FairThreadPool(1)
    yield one
    one.close()


def test_connections_are_served_round_robin(threads: FairThreadPool) -> None:
    order, gate = list[str](), threading.Event()

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(threads.run("a", gate.wait))
            for peer in "aaaabbc":
                tasks.create_task(threads.run(peer, order.append, peer))
            await asyncio.sleep(0)
            gate.set()

    asyncio.run(run())
    assert "".join(order) == "abcabaa"


def test_results_and_times(threads: FairThreadPool) -> None:
    gate = threading.Event()

    async def run() -> None:
        first = asyncio.create_task(threads.run("a", gate.wait))
        second = asyncio.create_task(threads.run("a", int, "7"))
        await asyncio.sleep(0.05)
        gate.set()
        held, done = await first, await second
        assert done.value == 7
        assert held.waited_s < held.elapsed_s
        assert done.waited_s > done.elapsed_s
        with pytest.raises(ValueError, match="invalid literal"):
            await threads.run("a", int, "seven")
        assert (await threads.run("a", int, "8")).value == 8

    asyncio.run(run())


def test_cancelled_calls_do_not_start_or_keep_their_thread_until_they_end(
    threads: FairThreadPool,
) -> None:
    done, gate = list[str](), threading.Event()

    async def run() -> None:
        working = asyncio.create_task(threads.run("a", gate.wait))
        cancelled = asyncio.create_task(threads.run("a", done.append, "cancelled"))
        waiting = asyncio.create_task(threads.run("b", done.append, "waiting"))
        await asyncio.sleep(0)
        for task in (working, cancelled):
            task.cancel()
        await asyncio.wait([working, cancelled])
        assert working.cancelled()
        assert not done
        gate.set()
        await waiting

    asyncio.run(run())
    assert done == ["waiting"]


def test_slow_images_of_one_connection_do_not_block_another(
    bundle: Path, picture: Callable[..., bytes]
) -> None:
    file = BytesIO()
    Image.new("RGB", (4000, 4000)).save(file, "PNG")
    own = [("grpc.use_local_subchannel_pool", 1)]
    slow = pb.DetectRequest(image=file.getvalue())

    async def run() -> int:
        config = ServeConfig(port=0, drain_delay_s=0, stop_grace_s=60, threads=1)
        async with (
            detection_server(bundle, config) as address,
            grpc.aio.insecure_channel(address, options=own) as greedy,
            grpc.aio.insecure_channel(address, options=own) as modest,
        ):
            many: Any = DetectorStub(greedy)
            one: Any = DetectorStub(modest)
            stream = many.DetectStream()
            answered = 0

            async def read() -> None:
                nonlocal answered
                async for _ in stream:
                    answered += 1

            reading = asyncio.create_task(read())
            for _ in range(12):
                await stream.write(slow)
            await stream.done_writing()
            assert (await one.Detect(pb.DetectRequest(image=picture()))).detections
            before = answered
            await reading
            assert answered == 12
            return before

    assert asyncio.run(run()) < 9

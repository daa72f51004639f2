"""Threads for images, for which connections take turns, alone and in a server."""

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
from maskrcnn_trt.serving.image_threads import ImageThreads
from maskrcnn_trt.serving.server import detection_server


@pytest.fixture
def threads() -> Iterator[ImageThreads]:
    one = ImageThreads(1)
    yield one
    one.close()


def test_connections_take_turns(threads: ImageThreads) -> None:
    order, gate = list[str](), threading.Event()

    async def ask() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(threads.run("a", gate.wait))
            for peer in "aaaabbc":
                tasks.create_task(threads.run(peer, order.append, peer))
            await asyncio.sleep(0)
            gate.set()

    asyncio.run(ask())
    assert "".join(order) == "abcabaa"


def test_result_and_times_are_told(threads: ImageThreads) -> None:
    gate = threading.Event()

    async def ask() -> None:
        first = asyncio.create_task(threads.run("a", gate.wait))
        second = asyncio.create_task(threads.run("a", int, "7"))
        await asyncio.sleep(0.05)
        gate.set()
        held, done = await first, await second
        assert done.value == 7
        assert held.waited_s < held.worked_s
        assert done.waited_s > done.worked_s
        with pytest.raises(ValueError, match="invalid literal"):
            await threads.run("a", int, "seven")
        assert (await threads.run("a", int, "8")).value == 8

    asyncio.run(ask())


def test_what_nobody_waits_for_is_not_begun_and_keeps_its_thread_while_it_works(
    threads: ImageThreads,
) -> None:
    done, gate = list[str](), threading.Event()

    async def ask() -> None:
        working = asyncio.create_task(threads.run("a", gate.wait))
        given_up = asyncio.create_task(threads.run("a", done.append, "given up"))
        waiting = asyncio.create_task(threads.run("b", done.append, "waiting"))
        await asyncio.sleep(0)
        for task in (working, given_up):
            task.cancel()
        await asyncio.wait([working, given_up])
        assert working.cancelled()
        assert not done
        gate.set()
        await waiting

    asyncio.run(ask())
    assert done == ["waiting"]


def test_a_connection_with_slow_images_does_not_shut_another_out(
    bundle: Path, picture: Callable[..., bytes]
) -> None:
    file = BytesIO()
    Image.new("RGB", (4000, 4000)).save(file, "PNG")
    own = [("grpc.use_local_subchannel_pool", 1)]
    slow = pb.DetectRequest(image=file.getvalue())

    async def ask() -> int:
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

    assert asyncio.run(ask()) < 9

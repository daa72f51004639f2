"""Fair thread pool, alone and in a server."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from in_process_server import connected, served
from PIL import Image

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.pipeline.scheduling import FairThreadPool


@pytest.fixture
def threads() -> Iterator[FairThreadPool]:
    one = FairThreadPool(1)
    yield one
    one.close()


async def test_connections_are_served_round_robin(threads: FairThreadPool) -> None:
    order, gate = list[str](), threading.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(threads.run("a", gate.wait))
        for peer in "aaaabbc":
            tasks.create_task(threads.run(peer, order.append, peer))
        await asyncio.sleep(0)
        gate.set()
    assert "".join(order) == "abcabaa"


async def test_results_and_times(threads: FairThreadPool) -> None:
    gate = threading.Event()
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


async def test_cancelled_calls_do_not_start_or_keep_their_thread_until_they_end(
    threads: FairThreadPool,
) -> None:
    done, gate = list[str](), threading.Event()
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
    assert done == ["waiting"]


async def test_a_thread_that_cannot_be_started_is_not_lost(
    threads: FairThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="start new thread"):
            await threads.run("a", int, "7")
    async with asyncio.timeout(60):
        assert (await threads.run("a", int, "8")).value == 8


async def test_slow_images_of_one_connection_do_not_block_another(
    bundle: Path, picture: Callable[..., bytes]
) -> None:
    file = BytesIO()
    Image.new("RGB", (3000, 3000)).save(file, "PNG")
    slow, answered = pb.DetectRequest(image=file.getvalue()), 0
    async with (
        served(bundle, stop_grace_s=60, threads=1) as address,
        connected(address) as greedy,
        connected(address) as modest,
    ):
        stream = greedy.DetectStream()

        async def read() -> None:
            nonlocal answered
            async for _ in stream:
                answered += 1

        reading = asyncio.create_task(read())
        for _ in range(12):
            await stream.write(slow)
        await stream.done_writing()
        assert (await modest.Detect(pb.DetectRequest(image=picture()))).detections
        assert answered < 9
        await reading
        assert answered == 12

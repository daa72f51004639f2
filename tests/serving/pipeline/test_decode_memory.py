"""Budget of bytes for images in decoding."""

import asyncio
import contextlib
import threading

import pytest

from maskrcnn_trt.model.host_resources import memory_limit
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.pipeline.scheduling import FairThreadPool
from maskrcnn_trt.serving.pipeline.shared_resources import DecodeMemory, decode_memory_limit


class Images:
    """Images that hold memory until they are ended, in order of their start."""

    def __init__(self, memory: DecodeMemory) -> None:
        self._memory = memory
        self.started: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, name: str, size: int) -> None:
        """Decode an image of the connection `name[0]`."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._decode(name, size))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def _decode(self, name: str, size: int) -> None:
        async with self._memory.reserve_in_thread(name[0], size):
            self.started.append(name)
            assert self._memory.reserved <= self._memory.largest
            await self._ends[name].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_large_images_wait_in_turns_and_small_ones_never() -> None:
    memory = DecodeMemory(400, threads=4)
    assert (memory.small, memory.largest) == (25, 300)
    images = Images(memory)
    for name, size in (("a0", 200), ("a1", 200), ("a2", 150), ("b0", 150), ("c0", 26), ("c1", 25)):
        await images.add(name, size)
    # a1 does not fit, and no large image overtakes it, not even c0.
    assert images.started == ["a0", "c1"]
    await images.end("a0")
    assert images.started[2:] == ["a1"]
    await images.end("a1")
    assert images.started[3:] == ["b0", "c0"]
    await images.end("b0")
    assert images.started[5:] == ["a2"]
    for name in ("a2", "c0", "c1"):
        await images.end(name)
    assert memory.reserved == 0


async def test_cancelled_images_leave_the_queue_and_give_back_their_memory() -> None:
    memory = DecodeMemory(400, threads=4)
    images = Images(memory)
    for name, size in (("a0", 200), ("b0", 300), ("b1", 200), ("c0", 100)):
        await images.add(name, size)
    for name in ("b0", "a0"):
        images.tasks[name].cancel()
        await settle()
    assert images.started == ["a0", "b1", "c0"] or images.started == ["a0", "c0", "b1"]
    await images.end("b1")
    # Cancelled in the loop iteration in which it gets its memory.
    await images.add("d0", 300)
    images.tasks["c0"].cancel()
    await asyncio.sleep(0)
    images.tasks["d0"].cancel()
    await settle()
    assert memory.reserved == 0


async def test_memory_stays_reserved_until_the_thread_has_decoded_the_image() -> None:
    memory, threads, end = DecodeMemory(400, threads=4), FairThreadPool(4), threading.Event()
    began = threading.Event()

    def decode() -> None:
        began.set()
        end.wait(60)

    async def process() -> None:
        async with memory.reserve("a", 200) as reserved:
            await threads.run("a", decode, memory=reserved)

    task = asyncio.create_task(process())
    await asyncio.to_thread(began.wait, 60)
    task.cancel()
    await asyncio.wait([task])
    assert memory.reserved == 200
    end.set()
    while memory.reserved:
        await asyncio.sleep(0.01)
    await process()
    await settle()
    assert memory.reserved == 0
    threads.close()


async def test_image_above_the_budget_is_rejected_with_the_setting() -> None:
    memory = DecodeMemory(400 << 20, threads=4)
    with pytest.raises(ImageError, match=r"301 MiB.*decode_memory_mb \(400\)"):
        async with memory.reserve("a", 301 << 20):
            pass
    with contextlib.suppress(ImageError):
        async with memory.reserve("a", 300 << 20):
            assert memory.reserved == memory.largest


def test_default_budget_is_a_quarter_of_the_memory() -> None:
    assert decode_memory_limit(ServeConfig()) == memory_limit() // 4
    assert decode_memory_limit(ServeConfig(decode_memory_mb=64)) == 64 << 20

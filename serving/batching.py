"""Dynamic batching: requests that arrive together are computed together."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..model.spec import ShapeBucket
from .backends.base import Backend, Outputs
from .preprocessing import ModelInput


class BatchResult(NamedTuple):
    """What a batch gave, from the point of view of one of its images."""

    outputs: Outputs
    """Outputs of the whole batch."""
    row: int
    """The image's place in it."""
    queue_s: float
    """Seconds between the image's arrival and the start of the batch."""
    infer_s: float
    """Seconds of the batch, its wait for those before it on a backend that overlaps included."""
    batch_size: int


@dataclass(frozen=True, eq=False)
class _Waiting:
    image: ModelInput
    arrival: float
    result: asyncio.Future[BatchResult]


class Batcher:
    """Collects images into batches of one shape bucket, as many at once as the backend overlaps.

    A bucket is ripe when it holds a full batch, or when its oldest image has waited `max_delay_s`.
    Of the ripe buckets the one whose head has waited longest goes first, so none starves.
    """

    def __init__(self, backend: Backend, max_batch: int, max_delay_s: float) -> None:
        self._backend = backend
        self._max_batch = max_batch
        self._max_delay_s = max_delay_s
        self._queues: dict[ShapeBucket, deque[_Waiting]] = {b: deque() for b in backend.buckets}
        self._arrived = asyncio.Event()
        self._places = asyncio.Semaphore(backend.concurrency)
        self._threads = ThreadPoolExecutor(backend.concurrency, thread_name_prefix="backend")

    async def warm_up(self) -> None:
        """Warm the backend up; images that arrive meanwhile take their turn."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._backend.warm_up, self._max_batch)

    async def infer(self, image: ModelInput) -> BatchResult:
        """Compute one image in the next batch of its bucket.

        If the caller is cancelled while the image waits, the image leaves the queue.
        """
        queue = self._queues[image.bucket]
        waiting = _Waiting(image, time.monotonic(), asyncio.get_running_loop().create_future())
        queue.append(waiting)
        self._arrived.set()
        try:
            return await waiting.result
        finally:
            if waiting in queue:
                queue.remove(waiting)

    async def run(self) -> None:
        """Compute batches until cancelled."""
        async with asyncio.TaskGroup() as batches:
            while True:
                await self._places.acquire()
                bucket = await self._ripe_bucket()
                queue = self._queues[bucket]
                batch = [queue.popleft() for _ in range(min(self._max_batch, len(queue)))]
                batches.create_task(self._compute(bucket, batch))

    def close(self) -> None:
        """Wait for the last batches and release the backend."""
        self._threads.shutdown()
        self._backend.close()

    async def _ripe_bucket(self) -> ShapeBucket:
        while True:
            self._arrived.clear()
            now = time.monotonic()
            heads = [(q[0].arrival, b) for b, q in self._queues.items() if q]
            ripe = [
                (arrival, bucket)
                for arrival, bucket in heads
                if len(self._queues[bucket]) >= self._max_batch
                or now - arrival >= self._max_delay_s
            ]
            if ripe:
                return min(ripe)[1]
            delay = min(heads)[0] + self._max_delay_s - now if heads else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), delay)

    async def _compute(self, bucket: ShapeBucket, batch: Sequence[_Waiting]) -> None:
        start = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            outputs = await loop.run_in_executor(self._threads, self._infer, bucket, batch)
        except Exception as error:
            for waiting in batch:
                if not waiting.result.done():
                    waiting.result.set_exception(error)
            return
        finally:
            self._places.release()
        infer_s = time.monotonic() - start
        for row, waiting in enumerate(batch):
            if not waiting.result.done():
                queue_s = start - waiting.arrival
                waiting.result.set_result(BatchResult(outputs, row, queue_s, infer_s, len(batch)))

    def _infer(self, bucket: ShapeBucket, batch: Sequence[_Waiting]) -> Outputs:
        images = np.stack([waiting.image.pixels for waiting in batch])
        sizes = np.array([waiting.image.size for waiting in batch], np.int64)
        return self._backend.infer(bucket, images, sizes)

"""Dynamic batching: requests that arrive together are computed together."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .backends.base import Backend, Outputs
from .errors import BackendDownError, BackendError
from .preprocessing import ModelInput
from .scheduling import DEFAULT_TERMS, BatchPolicy, RequestTerms, Schedule, Ticket

_log = logging.getLogger(__name__)

_FAILURES = 3
"""Batches that fail one after the other before the backend counts as broken."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


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
    result: asyncio.Future[BatchResult]


_Batch = Sequence[Ticket[_Waiting]]


class Batcher:
    """Computes batches on one backend, as many at once as it overlaps, and reloads one that broke.

    A batch that fails fails its images. When several fail one after the other the backend is
    loaded again, and until that succeeds all images are refused.
    """

    def __init__(self, load: Callable[[], Backend], policy: BatchPolicy) -> None:
        """Load the backend.

        Args:
            load: Loads it; called again when it breaks, from another thread.
            policy: How many images make a batch.
        """
        self._load = load
        self._policy = policy
        self._backend: Backend | None = load()
        self.buckets = self._backend.buckets
        self.backend_name = self._backend.name
        self.device = self._backend.device
        self._schedule = Schedule[_Waiting](policy, self.buckets)
        self._changed = asyncio.Event()
        self._failures = 0
        self._down = False
        self._places = asyncio.Semaphore(self._backend.concurrency)
        self._threads = ThreadPoolExecutor(self._backend.concurrency, thread_name_prefix="backend")

    @property
    def is_up(self) -> bool:
        """Whether the backend is there; not while one that broke is loaded again."""
        return not self._down

    @property
    def waiting(self) -> int:
        """Images that wait for a batch."""
        return len(self._schedule)

    async def warm_up(self) -> None:
        """Warm the backend up; images that arrive meanwhile take their turn."""
        assert self._backend is not None
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._backend.warm_up, self._policy.max_batch)

    async def infer(self, image: ModelInput, terms: RequestTerms = DEFAULT_TERMS) -> BatchResult:
        """Compute one image in a batch of its bucket.

        If the caller is cancelled while the image waits, the image leaves the queue.

        Raises:
            BackendDownError: the backend broke and is not there again yet.
        """
        if self._down:
            raise _down_error()
        waiting = _Waiting(image, asyncio.get_running_loop().create_future())
        ticket = self._schedule.add(waiting, image.bucket, terms, time.monotonic())
        self._changed.set()
        try:
            return await waiting.result
        finally:
            self._schedule.discard(ticket)

    async def run(self) -> None:
        """Compute batches until cancelled."""
        while True:
            async with asyncio.TaskGroup() as batches:
                while not self._down:
                    await self._places.acquire()
                    if batch := await self._next_batch():
                        batches.create_task(self._compute(batch))
                    else:
                        self._places.release()
            await self._restart()

    def close(self) -> None:
        """Wait for the last batches and release the backend."""
        self._threads.shutdown()
        self._release()

    async def _next_batch(self) -> _Batch:
        """The next batch; none once the backend is down."""
        while not self._down:
            self._changed.clear()
            now = time.monotonic()
            if batch := self._schedule.take(now):
                return batch
            due = self._schedule.due()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if due is None else due - now)
        return []

    async def _compute(self, batch: _Batch) -> None:
        start = time.monotonic()
        images = [ticket.item.image for ticket in batch]
        loop = asyncio.get_running_loop()
        try:
            outputs = await loop.run_in_executor(self._threads, self._infer, images)
        except Exception as error:
            _fail(batch, error)
            self._count_failure()
            return
        finally:
            self._places.release()
        self._failures = 0
        infer_s = time.monotonic() - start
        for row, ticket in enumerate(batch):
            if not ticket.item.result.done():
                queue_s = start - ticket.arrival
                result = BatchResult(outputs, row, queue_s, infer_s, len(batch))
                ticket.item.result.set_result(result)

    def _infer(self, images: Sequence[ModelInput]) -> Outputs:
        assert self._backend is not None
        pixels = np.stack([image.pixels for image in images])
        sizes = np.array([image.size for image in images], np.int64)
        try:
            return self._backend.infer(images[0].bucket, pixels, sizes)
        except SystemExit as error:  # which would end the event loop
            raise BackendError("the backend ended its thread") from error

    def _count_failure(self) -> None:
        self._failures += 1
        if self._failures == _FAILURES:
            self._down = True
            self._changed.set()
            _fail(self._schedule.take_all(), _down_error())

    async def _restart(self) -> None:
        """Load the backend again, however often that takes."""
        _log.error("%d batches in a row failed; the model is loaded again", _FAILURES)
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await loop.run_in_executor(self._threads, self._replace)
            except Exception:
                _log.exception("the model does not load; next try in %g s", pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                break
        self._failures = 0
        self._down = False
        _log.warning("the model is loaded again, and computes")

    def _replace(self) -> None:
        try:
            self._release()  # first: there may be no memory for two
        except Exception:
            _log.exception("the broken model could not be released")
        self._backend = self._load()
        self._backend.warm_up(self._policy.max_batch)

    def _release(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()


def _fail(batch: _Batch, error: Exception) -> None:
    for ticket in batch:
        if not ticket.item.result.done():
            ticket.item.result.set_exception(error)


def _down_error() -> BackendDownError:
    return BackendDownError("the model failed and is being loaded again; try again in a while")

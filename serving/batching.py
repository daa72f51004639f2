"""Dynamic batching: requests that arrive together are computed together."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..model.spec import ShapeBucket
from .engines.engine_process import EngineProcess
from .errors import BackendDownError
from .scheduling import DEFAULT_TERMS, BatchPolicy, RequestTerms, Schedule, Ticket

_log = logging.getLogger(__name__)

_FAILURES = 3
"""Batches that fail one after the other before an engine counts as broken."""
LONGEST_START_S = 600.0
"""For an engine to start, before it counts as hung."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class _HasBucket(Protocol):
    @property
    def bucket(self) -> ShapeBucket: ...


Item = TypeVar("Item", bound=_HasBucket)
Result = TypeVar("Result")


class BatchResult(NamedTuple, Generic[Result]):
    """What a batch gave, from the point of view of one of its items."""

    value: Result
    queue_s: float
    """Seconds between the item's arrival and the start of the batch."""
    infer_s: float
    """Seconds of the batch, its wait for those before it on an engine that overlaps included."""
    batch_size: int


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[Item, Result]):
    item: Item
    model: str
    result: asyncio.Future[BatchResult[Result]]


_Batch = Sequence[Ticket[_Waiting[Item, Result]]]


@dataclass(eq=False)
class _Worker(Generic[Item, Result]):
    """One life of an engine's process."""

    engine: EngineProcess[Item, Result]
    is_up: bool
    """Whether it takes batches."""
    in_flight: int = 0
    """Batches that it has begun."""
    begun_at: float = 0.0
    """When it began the last of them, on the monotonic clock."""
    failures: int = 0
    """Batches that failed since one was good."""


class Batcher(Generic[Item, Result]):
    """Computes the batches of one queue on one or several engines, and restarts those that break.

    A batch that fails fails its items. When several fail one after the other on an engine, or its
    process ends, it is started again; while none is up, all items are refused.
    """

    def __init__(self, engines: Sequence[EngineProcess[Item, Result]], policy: BatchPolicy) -> None:
        """Take over engines.

        Args:
            engines: At least one, loaded and alike.
            policy: How many items make a batch.
        """
        info = engines[0].info
        self.info = info
        """What the engines are."""
        self._policy = policy
        self._schedule = Schedule[_Waiting[Item, Result]](policy, info.buckets)
        self._workers = [_Worker(engine, is_up=True) for engine in engines]
        self.restarts = 0
        """Engines that were replaced."""
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(
            sum(engine.info.concurrency for engine in engines), thread_name_prefix="engine"
        )

    @property
    def is_up(self) -> bool:
        """Whether an engine is there; not while all are started again."""
        return self.engines_up > 0

    @property
    def engines_up(self) -> int:
        """Engines that take batches."""
        return sum(worker.is_up for worker in self._workers)

    @property
    def gpus(self) -> list[int | None]:
        """The GPU of each engine by its number, none for those that compute on the CPU."""
        on_gpu = self.info.device == "cuda"
        return [worker.engine.place.gpu if on_gpu else None for worker in self._workers]

    @property
    def concurrency(self) -> int:
        """Batches that may overlap, at least one."""
        return max(1, self.engines_up * self.info.concurrency)

    @property
    def waiting(self) -> Counter[str]:
        """Items that wait for a batch, by the name that they ask for the model by."""
        return Counter(ticket.item.model for ticket in self._schedule)

    async def warm_up(self) -> None:
        """Warm the engines up; items that arrive meanwhile wait."""
        loop, max_batch = asyncio.get_running_loop(), self._policy.max_batch
        engines = [worker.engine for worker in self._workers]
        warming = (loop.run_in_executor(self._threads, e.warm_up, max_batch) for e in engines)
        try:
            await asyncio.gather(*warming)
        except BaseException:
            for engine in engines:  # which `close` would wait for
                engine.kill()
            raise

    async def infer(self, item: Item, terms: RequestTerms = DEFAULT_TERMS) -> BatchResult[Result]:
        """Compute one item in a batch of its bucket.

        If the caller is cancelled while the item waits, it leaves the queue.

        Raises:
            BackendDownError: no engine is there, or the one that computed it ended.
            BackendError: the engine failed on the batch.
        """
        if not self.is_up:
            raise _down_error()
        result: asyncio.Future[BatchResult[Result]] = asyncio.get_running_loop().create_future()
        waiting = _Waiting[Item, Result](item, terms.model, result)
        ticket = self._schedule.add(waiting, item.bucket, terms, time.monotonic())
        self._changed.set()
        try:
            return await result
        finally:
            self._schedule.discard(ticket)

    async def run(self) -> None:
        """Compute batches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._workers)):
                tasks.create_task(self._keep_up(number))
            while True:
                worker, batch = await self._next_batch()
                tasks.create_task(self._compute(worker, batch))

    def close(self) -> None:
        """Wait for the last batches and end the engines, unless that is done."""
        up = [worker.engine for worker in self._workers if worker.is_up]
        for worker in self._workers:
            if not worker.is_up:
                worker.engine.kill()  # or it would be waited for until it had started
            worker.is_up = False
        # In threads of their own, as a batch that hangs keeps one of the others.
        with ThreadPoolExecutor(max(1, len(up))) as closing:
            list(closing.map(EngineProcess.close, up))
        self._threads.shutdown()
        for worker in self._workers:
            worker.engine.exited.result()

    async def _next_batch(self) -> tuple[_Worker[Item, Result], _Batch[Item, Result]]:
        """The next batch, and who is to compute it."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            worker = self._least_busy()
            is_busy = worker is None or worker.in_flight >= self.info.busy_from
            if worker and (batch := self._schedule.take(now, only_full=is_busy)):
                worker.in_flight += 1
                worker.begun_at = now
                return worker, batch
            due = None if is_busy else self._schedule.due()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if due is None else due - now)

    def _least_busy(self) -> _Worker[Item, Result] | None:
        """The worker that may begin a batch next, if one may; of equals the longest idle."""
        able = [w for w in self._workers if w.is_up and w.in_flight < self.info.concurrency]
        return min(able, key=lambda worker: (worker.in_flight, worker.begun_at), default=None)

    async def _compute(self, worker: _Worker[Item, Result], batch: _Batch[Item, Result]) -> None:
        start = time.monotonic()
        items = [ticket.item.item for ticket in batch]
        loop = asyncio.get_running_loop()
        try:
            values = await loop.run_in_executor(self._threads, worker.engine.compute, items)
            answered = list(zip(batch, values, strict=True))
        except Exception as error:
            _fail(batch, error)
            worker.failures += 1
            if isinstance(error, BackendDownError) or worker.failures == _FAILURES:
                self._take_down(worker)
        else:
            worker.failures = 0
            infer_s = time.monotonic() - start
            for ticket, value in answered:
                if not ticket.item.result.done():
                    queue_s = start - ticket.arrival
                    ticket.item.result.set_result(BatchResult(value, queue_s, infer_s, len(batch)))
        worker.in_flight -= 1
        self._changed.set()

    async def _keep_up(self, number: int) -> None:
        """Let a worker take batches, and replace it when its process has ended, time and again."""
        while True:
            worker = self._workers[number]
            self._changed.set()
            how = await asyncio.wrap_future(worker.engine.exited)
            self._take_down(worker)
            _log.error("%s; the engine is started again", how)
            await self._replace(number)
            self.restarts += 1
            _log.warning("the engine is there again")

    def _take_down(self, worker: _Worker[Item, Result]) -> None:
        """End a worker, and refuse all that waits if it was the last."""
        worker.is_up = False
        worker.engine.kill()
        if not self.is_up:
            _fail(self._schedule.take_all(), _down_error())

    async def _replace(self, number: int) -> None:
        """Start an engine again, however often that takes."""
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                engine = self._workers[number].engine.successor()
                self._workers[number] = worker = _Worker(engine, is_up=False)
                async with asyncio.timeout(LONGEST_START_S):
                    await loop.run_in_executor(self._threads, self._prepare, engine)
            except Exception:
                _log.exception("the engine does not start; next try in %g s", pause_s)
                self._workers[number].engine.kill()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                worker.is_up = True
                return

    def _prepare(self, engine: EngineProcess[Item, Result]) -> None:
        engine.load()
        engine.warm_up(self._policy.max_batch)


def _fail(batch: _Batch[Item, Result], error: Exception) -> None:
    for ticket in batch:
        if not ticket.item.result.done():
            ticket.item.result.set_exception(error)


def _down_error() -> BackendDownError:
    return BackendDownError("the model failed and is being loaded again; try again in a while")

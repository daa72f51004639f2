"""Dynamic batching: group queued images into batches, compute them, and restart failed workers."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from ...model.bundle.manifest import BundleError
from ...model.bundle.spec import ShapeBucket
from ..detections import DEFAULT_SCHEDULING, SchedulingOptions
from ..engines.worker_process import WorkerProcess
from ..errors import BackendDownError, BackendError, ServingError
from ..host import call_in_parallel, name_thread
from .scheduling import BatchPolicy, Reservation, Schedule, Ticket, time_limit

_log = logging.getLogger(__name__)

# Consecutive failed batches after which a worker is restarted.
_MAX_FAILURES = 3
# Time limit in seconds for starting a worker, loading its engine and warming it up.
START_TIMEOUT_S = 600.0
# Pause in seconds after a failed restart of a worker. It doubles after each further failure, up to
# the longest pause.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0

_IS_UP: Final = attrgetter("is_up")


class _HasBucket(Protocol):
    @property
    def bucket(self) -> ShapeBucket: ...


Item = TypeVar("Item", bound=_HasBucket)
Result = TypeVar("Result")


class BatchResult(NamedTuple, Generic[Result]):
    """Result of one image: engine output, queue time, and the batch's duration and size."""

    value: Result
    # Seconds from the image's arrival in the queue to the start of its batch.
    queue_s: float
    # Seconds from the start to the end of the image's batch, including any wait for earlier batches
    # on the same worker.
    infer_s: float
    batch_size: int


@dataclass(eq=False, slots=True)
class _PendingItem(Generic[Item, Result]):
    item: Item
    model: str
    memory: Reservation | None
    result: asyncio.Future[BatchResult[Result]]


_Batch = Sequence[Ticket[_PendingItem[Item, Result]]]


@dataclass(eq=False)
class _WorkerState(Generic[Item, Result]):
    """Worker process, with its state and the numbers of its in-flight and failed batches."""

    process: WorkerProcess[Item, Result]
    # Whether the worker accepts batches.
    is_up: bool
    # Number of batches in flight.
    in_flight: int = 0
    # `time.monotonic()` at the start of the worker's latest batch.
    last_start: float = 0.0
    # Consecutive failed batches.
    failures: int = 0


class Batcher(Generic[Item, Result]):
    """Queue of items, and the workers that compute them in batches.

    An item is the engine's input for one image. If a batch fails, all its items fail. A worker is
    restarted after three consecutive failed batches, or if its process ends. While no worker is up,
    new items are rejected.
    """

    def __init__(
        self, processes: Sequence[WorkerProcess[Item, Result]], policy: BatchPolicy
    ) -> None:
        """Take ownership of worker processes.

        Args:
            processes: Processes that have loaded the same model; at least one.
            policy: Rules for the size of a batch.

        Raises:
            BackendError: two processes chose backends that take different inputs.
        """
        # Properties of the first worker's engine. `_check_backend` compares other workers with it.
        self.info = processes[0].info
        for process in processes:
            self._check_backend(process)
        self._policy = policy
        self._schedule = Schedule[_PendingItem[Item, Result]](policy, self.info.buckets)
        self._workers = [_WorkerState(process, is_up=True) for process in processes]
        # Number of worker restarts so far.
        self.restarts = 0
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(
            sum(process.info.concurrency for process in processes),
            thread_name_prefix="engine",
            initializer=name_thread,
            initargs=("engine",),
        )

    @property
    def is_up(self) -> bool:
        """Whether at least one worker is up, that is, accepts batches."""
        return any(map(_IS_UP, self._workers))

    @property
    def engines_up(self) -> int:
        """Number of workers that are up. Each worker has one engine."""
        return sum(map(_IS_UP, self._workers))

    @property
    def gpus(self) -> list[int | None]:
        """CUDA index (from 0) of each worker's GPU. None: the worker computes on the CPU."""
        on_gpu = self.info.device == "cuda"
        return [worker.process.resources.gpu if on_gpu else None for worker in self._workers]

    @property
    def concurrency(self) -> int:
        """Number of batches that all workers together can have in flight; 1 if no worker is up."""
        return max(1, self.engines_up * self.info.concurrency)

    @property
    def waiting(self) -> Counter[str]:
        """Number of queued items per model name. The names are those in the requests."""
        return Counter(ticket.item.model for ticket in self._schedule)

    async def warm_up(self) -> None:
        """Warm up all workers. Items that arrive meanwhile are queued."""
        loop, max_batch = asyncio.get_running_loop(), self._policy.max_batch
        processes = [worker.process for worker in self._workers]
        warming = (loop.run_in_executor(self._threads, p.warm_up, max_batch) for p in processes)
        try:
            await asyncio.gather(*warming)
        except BaseException:
            for process in processes:  # otherwise `close` would wait for the warm-up to end
                process.kill()
            raise

    async def infer(
        self,
        item: Item,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
        memory: Reservation | None = None,
    ) -> BatchResult[Result]:
        """Queue an item, and return its result when its batch has been computed.

        If the calling task is cancelled while the item is queued, the item leaves the queue.

        Args:
            item: Input of the engine for one image.
            scheduling: Model, priority and connection of the request.
            memory: Reserved memory in which the engine decodes the image. It stays reserved until
                the item's batch ends, even if the calling task is cancelled.

        Raises:
            BackendDownError: no worker is up, all workers go down while the item is queued, or the
                worker process that computed the item ended.
            BackendError: the engine failed on the item's batch.
            BundleError: the model's outputs contradict the bundle's manifest.
        """
        if not self.is_up:
            raise _down_error()
        bucket = item.bucket
        result: asyncio.Future[BatchResult[Result]] = asyncio.get_running_loop().create_future()
        pending = _PendingItem(item, scheduling.model, memory, result)
        ticket = self._schedule.add(pending, bucket, scheduling, time.monotonic())
        # Wake `run` only if necessary. It also wakes when a batch ends, and when the oldest item
        # has waited for the maximum delay.
        if self._schedule.affects_next_start(bucket) and self._least_busy():
            self._changed.set()
        try:
            return await result
        except asyncio.CancelledError:
            self._schedule.discard(ticket)
            raise

    async def run(self) -> None:
        """Compute queued items, and restart failed workers, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._workers)):
                tasks.create_task(self._keep_up(index))
            while True:
                worker, batch = await self._next_batch()
                computing = tasks.create_task(self._compute(worker, batch))
                for ticket in batch:
                    if ticket.item.memory is not None:
                        ticket.item.memory.hold_until_done(computing)

    def close(self) -> None:
        """Wait for the in-flight batches and end the worker processes. Idempotent."""
        up = [worker.process for worker in self._workers if worker.is_up]
        for worker in self._workers:
            if not worker.is_up:
                worker.process.kill()  # otherwise `close` would wait for a process that is starting
            worker.is_up = False
        # `self._threads` is not used, because hanging batches may occupy all its threads.
        call_in_parallel([process.close for process in up])
        self._threads.shutdown()
        for worker in self._workers:
            worker.process.exited.result()

    async def _next_batch(self) -> tuple[_WorkerState[Item, Result], _Batch[Item, Result]]:
        """Wait until a batch and a worker for it are available. Return the worker and the batch."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            worker = self._least_busy()
            is_busy = worker is None or worker.in_flight >= self.info.saturating_batches
            if worker and (batch := self._schedule.take(now, only_full=is_busy)):
                worker.in_flight += 1
                worker.last_start = now
                return worker, batch
            due = None if is_busy else self._schedule.due()
            with contextlib.suppress(TimeoutError):
                # Unlike `asyncio.wait_for`, this starts no task in Python 3.11.
                async with asyncio.timeout(None if due is None else due - now):
                    await self._changed.wait()

    def _least_busy(self) -> _WorkerState[Item, Result] | None:
        """Return the worker with the fewest in-flight batches, or None if no worker accepts one.

        In case of a tie, return the worker whose latest batch started the longest time ago.
        """
        able = [w for w in self._workers if w.is_up and w.in_flight < self.info.concurrency]
        return min(able, key=lambda worker: (worker.in_flight, worker.last_start), default=None)

    async def _compute(
        self, worker: _WorkerState[Item, Result], batch: _Batch[Item, Result]
    ) -> None:
        start = time.monotonic()
        items = [ticket.item.item for ticket in batch]
        loop = asyncio.get_running_loop()
        try:
            values = await loop.run_in_executor(self._threads, worker.process.compute, items)
            results = list(zip(batch, values, strict=True))
        except Exception as error:
            _fail(batch, error)
            worker.failures += 1
            if isinstance(error, BackendDownError) or worker.failures == _MAX_FAILURES:
                self._take_down(worker)
        else:
            worker.failures = 0
            infer_s = time.monotonic() - start
            for ticket, value in results:
                if not ticket.item.result.done():
                    queue_s = start - ticket.arrival
                    ticket.item.result.set_result(BatchResult(value, queue_s, infer_s, len(batch)))
        worker.in_flight -= 1
        self._changed.set()

    async def _keep_up(self, index: int) -> None:
        """Restart worker number `index`, counted from 0, whenever its process ends."""
        while True:
            worker = self._workers[index]
            self._changed.set()
            exit_message = await asyncio.wrap_future(worker.process.exited)
            self._take_down(worker)
            loader = worker.process.loader
            _log.error("%s; restarting the worker process of %s", exit_message, loader)
            await self._restart(index)
            self.restarts += 1
            _log.warning("the worker process of %s has restarted and accepts batches again", loader)

    def _take_down(self, worker: _WorkerState[Item, Result]) -> None:
        """Kill a worker's process. If no other worker is up, fail all queued items."""
        worker.is_up = False
        worker.process.kill()
        if not self.is_up:
            _fail(self._schedule.take_all(), _down_error())

    async def _restart(self, index: int) -> None:
        """Start a new process for worker number `index`, counted from 0. Retry until it is up."""
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                process = self._workers[index].process.successor()
                self._workers[index] = worker = _WorkerState(process, is_up=False)
                async with time_limit(START_TIMEOUT_S, _start_timeout_error):
                    await loop.run_in_executor(self._threads, self._load, process)
            except Exception as error:
                is_known = isinstance(error, BundleError | ServingError)
                _log.error(
                    "cannot start the worker process of %s; next attempt in %g s: %s",
                    *(self._workers[index].process.loader, pause_s, error),
                    exc_info=not is_known,
                )
                self._workers[index].process.kill()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                worker.is_up = True
                return

    def _load(self, process: WorkerProcess[Item, Result]) -> None:
        process.load()
        self._check_backend(process)
        process.warm_up(self._policy.max_batch)

    def _check_backend(self, process: WorkerProcess[Item, Result]) -> None:
        """Check that a loaded process can compute the same batches as the first worker.

        With the backend `auto`, worker processes may choose different backends.

        Raises:
            BackendError: the process and the first worker differ in the input sizes of their
                engines, or in the engines' kind of input: encoded images or pixels.
        """
        own, first = process.info, self.info
        if (own.is_end_to_end, own.buckets) != (first.is_end_to_end, first.buckets):
            raise BackendError(
                f"a worker process chose the backend {own.backend}, but the model's first worker "
                f"uses {first.backend}, and the two backends cannot compute the same batches; the "
                f"log says why {own.backend} was chosen; to use one backend in all workers, set "
                "--backend"
            )


def _fail(batch: _Batch[Item, Result], error: Exception) -> None:
    for ticket in batch:
        if not ticket.item.result.done():
            ticket.item.result.set_exception(error)


def _start_timeout_error() -> BackendError:
    return BackendError(
        f"the model is not ready after {START_TIMEOUT_S:g} s; check that the bundle's disk and "
        "`nvidia-smi` respond"
    )


def _down_error() -> BackendDownError:
    return BackendDownError("all workers of the model failed and are restarting; try again later")

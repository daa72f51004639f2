"""Fair scheduling: order of queued images, shared semaphore and thread pool, and deadlines.

Images form batches by self-clocked fair queueing (Golestani, 1994). The image with the lowest
service tag is served first. The tag of a new image is max(V, T) + W:

- V is the virtual time: the tag of the first image of the latest batch.
- T is the tag of the latest queued image of the same connection and priority; 0 if there is none.
- W is 1, 8 or 64 for priority 1, 2 or 3, of which 1 is the most urgent.

If two connections with adjacent priorities both have a backlog, the more urgent one gets eight
images per image of the other, and neither starves.
"""

import asyncio
import contextlib
import time
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

from ...model.bundle.spec import ShapeBucket
from ..detections import SchedulingOptions, Value
from ..errors import ExpiredError
from ..host import name_thread

# Throughput ratio of two backlogged connections whose priorities differ by one level.
_WEIGHT = 8
# Sort key of queued tickets.
_SERVICE_TAG: Final = attrgetter("service_tag")

T = TypeVar("T")


class BatchPolicy(NamedTuple):
    """Rules for the size of a batch."""

    # Maximum number of images in a batch.
    max_batch: int
    # Maximum time in seconds that an image waits for its batch to fill.
    max_delay_s: float
    # Smaller sizes at which a batch starts without waiting for more images.
    preferred: tuple[int, ...] = ()

    def size_of(self, waiting: int, *, overdue: bool) -> int:
        """Return the size of the next batch, or 0 to wait for more images.

        If at least `max_batch` images are queued, the size is `max_batch`. Otherwise, it is the
        largest size in `preferred` that the queued images fill. If they fill no preferred size and
        `overdue` is True, the batch takes all queued images.

        Args:
            waiting: Number of queued images.
            overdue: Whether at least one queued image has waited for `max_delay_s`.
        """
        if waiting >= self.max_batch:
            return self.max_batch
        preferred = max((size for size in self.preferred if size <= waiting), default=0)
        return preferred or (waiting if overdue else 0)


# Not frozen, because creating a frozen object takes several times as long.
@dataclass(eq=False, slots=True)
class Ticket(Generic[T]):
    """Entry of a `Schedule`: a queued item with its arrival time and its order among the items."""

    item: T
    bucket: ShapeBucket
    # Arrival time in seconds: `now` in the call of `Schedule.add`.
    arrival: float
    # gRPC peer of the request; it identifies the client's connection.
    peer: str
    priority: int
    # Defined in the docstring of this module. The lowest tag is served first.
    service_tag: int


class Schedule(Generic[T]):
    """Queues of items (images) that wait for a batch, one queue per shape bucket (input size).

    The schedule does not read a clock: callers pass the current time in seconds as `now`.
    """

    def __init__(self, policy: BatchPolicy, buckets: Iterable[ShapeBucket]) -> None:
        self._policy = policy
        self._queues: dict[ShapeBucket, list[Ticket[T]]] = {bucket: [] for bucket in buckets}
        # Queued tickets by connection and priority, in order of arrival.
        self._connections: dict[tuple[str, int], list[Ticket[T]]] = {}
        self._virtual_time = 0

    def __iter__(self) -> Iterator[Ticket[T]]:
        """Iterate over the tickets of all queued items. Can be called from any thread."""
        return (ticket for queue in tuple(self._queues.values()) for ticket in tuple(queue))

    def add(
        self, item: T, bucket: ShapeBucket, scheduling: SchedulingOptions, now: float
    ) -> Ticket[T]:
        """Add an item to the queue of its input size, `bucket`, and return the item's ticket."""
        mine = self._connections.setdefault((scheduling.peer, scheduling.priority), [])
        last = mine[-1].service_tag if mine else 0
        tag = max(self._virtual_time, last) + _WEIGHT ** (scheduling.priority - 1)
        ticket = Ticket(item, bucket, now, scheduling.peer, scheduling.priority, tag)
        mine.append(ticket)
        insort(self._queues[bucket], ticket, key=_SERVICE_TAG)
        return ticket

    def affects_next_start(self, bucket: ShapeBucket) -> bool:
        """Return whether the newest item of `bucket` can change the start time of the next batch.

        The item can do so in two cases: it completes a batch, or it is the only item of its bucket,
        so that a batch is due once the item has waited `max_delay_s`. In all other cases, the task
        that starts batches need not wake.
        """
        waiting = len(self._queues[bucket])
        return waiting == 1 or self._policy.size_of(waiting, overdue=False) > 0

    def discard(self, ticket: Ticket[T]) -> None:
        """Remove a ticket if it is still queued."""
        queue = self._queues[ticket.bucket]
        if ticket in queue:
            queue.remove(ticket)
            self._remove_from_connection(ticket)

    def take(self, now: float, *, only_full: bool = False) -> list[Ticket[T]]:
        """Remove and return the tickets of the next batch. All have the same bucket (input size).

        A bucket is ready if `BatchPolicy.size_of` returns a batch size above 0 for it. Among the
        ready buckets, choose the one whose first item has the lowest service tag (see the docstring
        of this module). If no bucket is ready, return an empty list.

        Args:
            now: Current time in seconds.
            only_full: Return an empty list if the chosen bucket has fewer than `max_batch` items,
                even if another bucket has enough.
        """
        sizes = {bucket: self._size(queue, now) for bucket, queue in self._queues.items()}
        ready = [(q[0].service_tag, q[0].arrival, b) for b, q in self._queues.items() if sizes[b]]
        if not ready:
            return []
        tag, _, bucket = min(ready)
        if only_full and sizes[bucket] < self._policy.max_batch:
            return []
        self._virtual_time = tag
        queue = self._queues[bucket]
        batch = queue[: sizes[bucket]]
        del queue[: sizes[bucket]]
        for ticket in batch:
            self._remove_from_connection(ticket)
        return batch

    def take_all(self) -> list[Ticket[T]]:
        """Remove all queued items, and return their tickets."""
        waiting = list(self)
        for ticket in waiting:
            self.discard(ticket)
        return waiting

    def due(self) -> float | None:
        """Return the time in seconds at which the oldest item will have waited `max_delay_s`.

        The time has the same origin as `now` in `add`. If no item is queued, return None.
        """
        return min((ticket.arrival + self._policy.max_delay_s for ticket in self), default=None)

    def _remove_from_connection(self, ticket: Ticket[T]) -> None:
        key = (ticket.peer, ticket.priority)
        tickets = self._connections[key]
        tickets.remove(ticket)
        if not tickets:
            del self._connections[key]

    def _size(self, queue: list[Ticket[T]], now: float) -> int:
        overdue = any(now >= ticket.arrival + self._policy.max_delay_s for ticket in queue)
        return self._policy.size_of(len(queue), overdue=overdue)


class TimedResult(NamedTuple, Generic[Value]):
    """Result of a function call: its value, its duration, and its wait for a free thread."""

    value: Value
    # Duration of the call in seconds.
    elapsed_s: float
    # Seconds that the call waited for a free thread.
    waited_s: float = 0.0


def timed(work: Callable[..., Value], *arguments: Any) -> TimedResult[Value]:
    """Call a function in this thread. Return the result with the call's duration."""
    start = time.perf_counter()
    value = work(*arguments)
    return TimedResult(value, time.perf_counter() - start)


class FairSemaphore:
    """Semaphore whose free units go to the waiting connections in round-robin order.

    If too few units are free for the next connection in this order, all connections wait, so that
    small acquisitions cannot delay a large one forever.

    Call the methods from one event loop only.
    """

    def __init__(self, capacity: int) -> None:
        # Number of units, free or in use.
        self.capacity = capacity
        self.in_use = 0
        # Waiting acquisitions by connection, with their units, in round-robin order.
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    async def acquire(self, peer: str, units: int = 1) -> None:
        """Acquire units. If too few are free, wait for them.

        Args:
            peer: gRPC peer of the request; it identifies the client's connection.
            units: Number of units, at most `capacity`.
        """
        if not self._waiting and self.in_use + units <= self.capacity:
            self.in_use += units
            return
        acquired = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append((units, acquired))
        try:
            await acquired
        except asyncio.CancelledError:
            if acquired.cancelled():
                self._admit()  # acquisitions behind this one may need fewer units
            else:  # the task got the units, but was cancelled in the same event loop iteration
                self.release(units)
            raise

    def release(self, units: int = 1) -> None:
        """Release acquired units, and give them to waiting acquisitions."""
        self.in_use -= units
        self._admit()

    def _admit(self) -> None:
        """Give units to waiting acquisitions until too few are free for the next one."""
        while self._waiting:
            peer = next(iter(self._waiting))
            units, acquired = self._waiting[peer][0]
            is_cancelled = acquired.cancelled()
            if not is_cancelled and self.in_use + units > self.capacity:
                return
            queue = self._waiting.pop(peer)
            queue.popleft()
            if queue and is_cancelled:
                self._waiting = {peer: queue, **self._waiting}
            elif queue:
                self._waiting[peer] = queue  # behind the other connections
            if not is_cancelled:
                self.in_use += units
                acquired.set_result(None)


class Reservation:
    """Reserved memory, which is released when its last holder has dropped it.

    The caller that reserved the memory is the first holder. Call the methods from one event loop
    only.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        """Create a reservation with one holder. `release` releases the memory."""
        self._release = release
        self._holders = 1

    def hold(self) -> None:
        """Add a holder, which must call `drop` when it no longer needs the memory."""
        self._holders += 1

    def hold_until_done(self, task: asyncio.Task[None]) -> None:
        """Add a holder, and remove it when a task is done."""
        self.hold()
        task.add_done_callback(lambda _: self.drop())

    def drop(self) -> None:
        """Remove a holder. If it was the last holder, release the memory."""
        self._holders -= 1
        if not self._holders:
            self._release()


class FairThreadPool:
    """Thread pool whose free threads go to the waiting connections in round-robin order.

    Call its methods from one event loop only, except `close`.
    """

    def __init__(self, size: int) -> None:
        # Number of threads.
        self.size = size
        self._threads = FairSemaphore(size)
        self._executor = ThreadPoolExecutor(
            size, "images", initializer=name_thread, initargs=("images",)
        )

    async def run(
        self,
        peer: str,
        work: Callable[..., Value],
        *arguments: Any,
        memory: Reservation | None = None,
    ) -> TimedResult[Value]:
        """Call a function in a thread. Return its value, duration and queue time (in seconds).

        If the calling task is cancelled while it waits for a thread, the function is not called.
        If the task is cancelled later, the function runs to its end, and its result is dropped.

        Args:
            peer: gRPC peer of the request. It identifies the client's connection, and the threads
                are shared fairly between connections.
            work: Function to call.
            arguments: Arguments of the function.
            memory: Reserved memory that the function uses. It stays reserved until the function
                ends, even if the calling task is cancelled.

        Raises:
            RuntimeError: a new thread is needed, but cannot be started. Errors of the function are
                raised too.
        """
        start = time.perf_counter()
        await self._threads.acquire(peer)
        waited_s = time.perf_counter() - start
        try:
            running = self._executor.submit(timed, work, *arguments)
        except RuntimeError:  # the system does not allow another thread
            self._threads.release()
            raise
        # The thread is busy until the call ends, even if the caller is cancelled.
        if memory is not None:
            memory.hold()
        running.add_done_callback(self._release_callback(asyncio.get_running_loop(), memory))
        result: TimedResult[Value] = await asyncio.wrap_future(running)
        return result._replace(waited_s=waited_s)

    @property
    def busy(self) -> int:
        """Number of threads that are in use."""
        return self._threads.in_use

    def close(self) -> None:
        """Wait for the running functions, and end the threads."""
        self._executor.shutdown()

    def _release_callback(
        self, loop: asyncio.AbstractEventLoop, memory: Reservation | None
    ) -> Callable[[Future[Any]], None]:
        def release() -> None:
            self._threads.release()
            if memory is not None:
                memory.drop()

        def schedule(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so no call waits
                loop.call_soon_threadsafe(release)

        return schedule


def request_deadline(
    timeout_s: float | None, server_timeout_s: float | None
) -> contextlib.AbstractAsyncContextManager[None]:
    """Return a context manager that cancels its body at a request's deadline.

    The time counts from the start of the body.

    Args:
        timeout_s: Time limit in the request, in seconds. None: the request has no limit of its own.
        server_timeout_s: Time limit of the server in seconds. None: the server has no limit. If
            both limits are given, the lower one applies.

    Raises:
        ExpiredError: the body took longer than the limit. The context manager raises this error.
    """
    if timeout_s is None and server_timeout_s is None:
        return contextlib.nullcontext()
    limit_s = min(s for s in (timeout_s, server_timeout_s) if s is not None)
    owner, setting = "the server's", "--timeout-s of maskrcnn serve"
    if limit_s == timeout_s:
        owner = "its own"
        setting = (
            "timeout_us or the parameter timeout (--server-timeout of maskrcnn client, "
            "SchedulingOptions.timeout_s in Python)"
        )
    return time_limit(
        limit_s,
        lambda: ExpiredError(
            f"the request exceeded {owner} time limit of {limit_s:g} s; raise {setting}, or send "
            "fewer images at once"
        ),
    )


@contextlib.asynccontextmanager
async def time_limit(limit_s: float, timeout_error: Callable[[], Exception]) -> AsyncIterator[None]:
    """Context manager: if its body exceeds a time limit, cancel the body and raise an error.

    Args:
        limit_s: Time limit in seconds.
        timeout_error: Function that returns the error.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise timeout_error() from None

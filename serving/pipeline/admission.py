"""Admission control: limit on the number of in-flight images, shared fairly by connections."""

import asyncio
import math
from collections import Counter, deque
from contextlib import AbstractAsyncContextManager

from ...model.plurals import counted
from ..errors import QueueFullError

# Weight of the latest image in the moving average of the service time.
_SERVICE_TIME_WEIGHT = 0.05


class _Waiter:
    """Request that waits for admission slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.is_admitted = False
        # Set when the request is admitted or rejected.
        self.is_decided = asyncio.Event()


class AdmissionController:
    """Admission slots. Each in-flight image holds one.

    Connections share the slots max-min fairly. A connection deviates from its fair share by at most
    the number of slots that one request needs. The rules:

    - If enough slots are free and no request waits, a new request is admitted. A single connection
      can use all slots.
    - Otherwise let N be the slots that the connection holds or waits for, plus the slots of the new
      request. If N is at most the connection's max-min fair share, the request waits.
    - A connection's only request waits regardless of N, unless more connections have requests than
      there are slots.
    - Requests beyond the fair share are rejected, except requests of streams, which wait; see
      `acquire`.
    - Freed slots go to the waiting connection that holds the fewest slots; ties are resolved in
      round-robin order. If the free slots are too few for this connection's request, all other
      requests wait too, so that large requests are not overtaken forever.

    While any slot is in use, the number of slots depends on the recent service rate: it is the
    number of images that the server can compute within `max_wait_s`, but at least `min_capacity`
    and at most the constructor's `capacity`. The effects are:

    - If the estimated queue time exceeds `max_wait_s`, and at least `min_capacity` slots are in
      use, no slot is free. Requests beyond the fair share are then rejected immediately, except
      requests of streams.
    - Requests within the fair share are computed within `max_wait_s`, because batches are also
      formed fairly between connections.
    """

    def __init__(self, capacity: int, max_wait_s: float = math.inf, min_capacity: int = 1) -> None:
        """Create a controller with all slots free.

        Args:
            capacity: Maximum number of slots, and maximum number of requests that wait for slots.
            max_wait_s: Maximum estimated queue time of an image in seconds.
            min_capacity: Minimum number of slots, however low the service rate is.
        """
        self._max_capacity = capacity
        self._max_wait_s = max_wait_s
        self._min_capacity = min_capacity
        self._service_s = 0.0
        self._in_use = 0
        # By connection: number of slots that the connection holds (`_held`), and number that it
        # holds or waits for (`_claimed`).
        self._held = Counter[str]()
        self._claimed = Counter[str]()
        # Waiting requests by connection, in order of arrival. The connections are in round-robin
        # order.
        self._waiting: dict[str, deque[_Waiter]] = {}

    @property
    def capacity(self) -> int:
        """Current number of admission slots, free or in use.

        It is below the constructor's `capacity` while slots are in use and the service rate is low.
        """
        if not self._in_use or self._service_s * self._max_capacity <= self._max_wait_s:
            return self._max_capacity
        fitting = int(self._max_wait_s / self._service_s)
        return min(self._max_capacity, max(self._min_capacity, fitting))

    @property
    def in_use(self) -> int:
        """Number of admission slots that requests hold."""
        return self._in_use

    @property
    def estimated_wait_s(self) -> float:
        """Estimated queue time in seconds of a request that arrives now."""
        return self._in_use * self._service_s

    def set_service_time(self, seconds: float) -> None:
        """Set the moving average of the service time per image.

        Args:
            seconds: Service time: 1 / throughput (images/s) of the model under full load.
        """
        self._service_s = seconds
        self._admit_waiters()

    def observe_service_time(self, seconds: float) -> None:
        """Update the moving average of the service time with an estimate from one image.

        Args:
            seconds: Service time, as defined in `set_service_time`, estimated from one image.
        """
        self._service_s += _SERVICE_TIME_WEIGHT * (seconds - self._service_s)
        self._admit_waiters()

    def check(self, peer: str, slots: int = 1) -> None:
        """Check that a request may now acquire admission slots, or wait for them.

        Args:
            peer: gRPC peer of the request; it identifies the client's connection.
            slots: Number of slots.

        Raises:
            QueueFullError: the request exceeds its connection's fair share of the slots, and would
                have to wait: fewer than `slots` slots are free, or other requests already wait.
        """
        if self._is_free(slots) or self._is_within_share(peer, slots):
            return
        capacity, connections = self.capacity, len({*self._claimed, peer})
        setting = "max-wait-s" if capacity < self._max_capacity else "queue-size"
        raise QueueFullError(
            f"the server is busy: {self._in_use} of {capacity} admission slots, one per image, are "
            f"in use, shared by {counted(connections, 'connection')}; the request needs "
            f"{counted(slots, 'slot')}, but its connection already holds or waits for "
            f"{self._claimed[peer]}; try again later, or raise the server's --{setting}"
        )

    def acquire(
        self, peer: str, slots: int = 1, *, wait: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Acquire admission slots for a request, and hold them within the `async with` block.

        Args:
            peer: gRPC peer of the request; it identifies the client's connection.
            slots: Number of slots, at most the `capacity` given to the constructor.
            wait: Whether a request that exceeds its connection's fair share may wait for slots.

        Raises:
            QueueFullError: `wait` is False, and `check` rejects the request. Or the queue of
                waiting requests is full. A full queue rejects a request when it arrives, or later,
                to make room for a newer request of another connection.
        """
        return _Acquisition(self, peer, slots, wait=wait)

    async def _acquire(self, peer: str, slots: int, *, wait: bool) -> None:
        if self._is_free(slots):
            self._hold(peer, slots)
            return
        if not wait:
            self.check(peer, slots)
        await self._wait(peer, slots)

    async def _wait(self, peer: str, slots: int) -> None:
        self._make_room(peer)
        waiter = _Waiter(slots)
        self._waiting.setdefault(peer, deque()).append(waiter)
        self._claimed[peer] += slots
        try:
            await waiter.is_decided.wait()
        except asyncio.CancelledError:
            if waiter.is_admitted:
                self._release(peer, slots)
            elif not waiter.is_decided.is_set():
                self._remove(peer, waiter)
                self._admit_waiters()  # requests behind this one may need fewer slots
            raise
        if not waiter.is_admitted:
            raise _too_many_waiting()

    def _make_room(self, peer: str) -> None:
        """If the queue is full, reject a waiting request to make room for a request of `peer`.

        The rejected request is the newest one of the connection with the most waiting requests.

        Raises:
            QueueFullError: the queue is full, and the new request would give `peer` at least as
                many waiting requests as any other connection has.
        """
        if sum(map(len, self._waiting.values())) < self._max_capacity:
            return
        largest = max(self._waiting, key=lambda other: len(self._waiting[other]))
        if len(self._waiting[largest]) <= len(self._waiting.get(peer, ())) + 1:
            raise _too_many_waiting()
        newest = self._waiting[largest][-1]
        self._remove(largest, newest)
        newest.is_decided.set()

    def _admit_waiters(self) -> None:
        """Admit waiting requests until the free slots are too few for the next one."""
        while self._waiting:
            peer = min(self._waiting, key=lambda peer: self._held[peer])
            first = self._waiting[peer][0]
            if self._in_use + first.slots > self.capacity:
                return
            self._remove(peer, first)
            self._hold(peer, first.slots)
            if peer in self._waiting:  # put the connection behind the others
                self._waiting[peer] = self._waiting.pop(peer)
            first.is_admitted = True
            first.is_decided.set()

    def _is_free(self, slots: int) -> bool:
        return not self._waiting and self._in_use + slots <= self.capacity

    def _is_within_share(self, peer: str, slots: int) -> bool:
        others = [claimed for other, claimed in self._claimed.items() if other != peer]
        own = self._claimed[peer]
        if not own:
            return len(others) < self.capacity
        # The request is within the fair share if `capacity` is at least `own` plus the slots that
        # the other connections claim. Of each other connection, at most `own` slots are counted.
        own += slots
        return sum(min(claimed, own) for claimed in others) + own <= self.capacity

    def _hold(self, peer: str, slots: int) -> None:
        self._in_use += slots
        _add(self._held, peer, slots)
        _add(self._claimed, peer, slots)

    def _release(self, peer: str, slots: int) -> None:
        self._in_use -= slots
        _add(self._held, peer, -slots)
        _add(self._claimed, peer, -slots)
        self._admit_waiters()

    def _remove(self, peer: str, waiter: _Waiter) -> None:
        queue = self._waiting[peer]
        queue.remove(waiter)
        if not queue:
            del self._waiting[peer]
        _add(self._claimed, peer, -waiter.slots)


class _Acquisition(AbstractAsyncContextManager[None]):
    """Context manager of `AdmissionController.acquire`."""

    # A generator with the decorator `asynccontextmanager` would take several times as long.

    def __init__(
        self, controller: AdmissionController, peer: str, slots: int, *, wait: bool
    ) -> None:
        self._controller = controller
        self._peer = peer
        self._slots = slots
        self._wait = wait

    async def __aenter__(self) -> None:
        await self._controller._acquire(self._peer, self._slots, wait=self._wait)

    async def __aexit__(self, *_: object) -> None:
        self._controller._release(self._peer, self._slots)


def _add(slots: Counter[str], peer: str, number: int) -> None:
    """Add `number` (may be negative) to the slots of `peer`. If 0 slots remain, remove `peer`."""
    slots[peer] += number
    if not slots[peer]:
        del slots[peer]


def _too_many_waiting() -> QueueFullError:
    return QueueFullError(
        "too many requests wait for an admission slot, and with this one, no other connection has "
        "more of them than yours; try again later, or raise the server's --queue-size"
    )

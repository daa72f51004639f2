"""Admission control: limit the in-flight images and share the limit among connections."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from ..errors import QueueFullError

# Maximum number of slots that a connection may hold per free slot.
_SLOTS_PER_FREE_SLOT = 8
# Weight of the latest image in the moving average of the service time.
_SERVICE_TIME_WEIGHT = 0.05


class _Waiter(NamedTuple):
    peer: str
    slots: int
    is_admitted: asyncio.Event


class AdmissionController:
    """Admission slots. Each in-flight image (or open call, depending on `resource`) holds one.

    A connection may hold up to eight times as many slots as are free. A single connection gets
    nearly all slots, and a second one still finds free slots and soon holds as many as the first
    (dynamic thresholds; Choudhury and Hahne, 1998).

    If the server, at its recent service rate, cannot compute `capacity` images within `max_wait_s`,
    there are fewer slots, so that images that would wait longer are rejected immediately.
    """

    def __init__(
        self,
        capacity: int,
        max_wait_s: float = math.inf,
        min_capacity: int = 1,
        resource: str = "images in progress",
    ) -> None:
        """Create a controller with all slots free.

        Args:
            capacity: Maximum number of slots.
            max_wait_s: Maximum estimated queue time of an image in seconds.
            min_capacity: Slots that a slow model leaves available. A slow service rate otherwise
                lowers the number of slots below `capacity`.
            resource: Plural name of the objects that hold slots, used in error messages.
        """
        self._max_capacity = capacity
        self._max_wait_s = max_wait_s
        self._min_capacity = min_capacity
        self._resource = resource
        self._service_s = 0.0
        self._in_use = 0
        self._held: dict[str, int] = {}
        self._waiters: deque[_Waiter] = deque()

    @property
    def capacity(self) -> int:
        """Current number of slots at the recent service rate."""
        if not self._in_use or self._service_s * self._max_capacity <= self._max_wait_s:
            return self._max_capacity
        fitting = int(self._max_wait_s / self._service_s)
        return min(self._max_capacity, max(self._min_capacity, fitting))

    @property
    def in_use(self) -> int:
        """Number of slots that requests hold."""
        return self._in_use

    def observe_service_time(self, seconds: float) -> None:
        """Add the service time of one image to the moving average, in seconds."""
        self._service_s += _SERVICE_TIME_WEIGHT * (seconds - self._service_s)
        self._admit_waiters()

    def check(self, peer: str, slots: int = 1) -> None:
        """Check that `reserve` would succeed now, without holding slots.

        Raises:
            QueueFullError: the connection may not hold `slots` more slots.
        """
        if not self._fits(peer, slots):
            held, free = self._held.get(peer, 0), max(0, self.capacity - self._in_use)
            raise QueueFullError(
                f"the request needs {slots} admission slots ({self._resource}); {free} are free "
                f"and its connection holds {held}; a connection may hold {_SLOTS_PER_FREE_SLOT} "
                "slots per free slot; try again later"
            )

    @asynccontextmanager
    async def acquire(
        self, peer: str, slots: int = 1, *, wait: bool = False
    ) -> AsyncIterator[None]:
        """Hold slots within the context.

        Args:
            peer: gRPC peer of the request; it identifies the client's connection.
            slots: Number of slots, at most the `capacity` given to the constructor.
            wait: True: if the slots are not free, wait in a first-in-first-out queue.

        Raises:
            QueueFullError: without `wait`, the connection may not hold `slots` more slots now;
                with it, the queue of waiting requests is full.
        """
        if wait:
            await self._reserve_in_order(peer, slots)
        else:
            self.reserve(peer, slots)
        try:
            yield
        finally:
            self.release(peer, slots)

    def reserve(self, peer: str, slots: int = 1) -> None:
        """Hold slots for a connection until `release`.

        A connection that holds none may take any number of free slots.

        Raises:
            QueueFullError: the connection may not hold `slots` more slots.
        """
        self.check(peer, slots)
        self._count(peer, slots)

    def release(self, peer: str, slots: int = 1) -> None:
        """Free slots of a connection, then admit waiting requests that fit."""
        self._count(peer, -slots)
        self._admit_waiters()

    async def _reserve_in_order(self, peer: str, slots: int) -> None:
        if not self._waiters and self._fits(peer, slots):
            self._count(peer, slots)
        elif len(self._waiters) >= self._max_capacity:
            raise QueueFullError("too many requests wait for an admission slot; try again later")
        else:
            await self._wait_for_admission(_Waiter(peer, slots, asyncio.Event()))

    async def _wait_for_admission(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        try:
            await waiter.is_admitted.wait()
        except asyncio.CancelledError:
            if waiter.is_admitted.is_set():
                self.release(waiter.peer, waiter.slots)
            else:
                self._waiters.remove(waiter)
                self._admit_waiters()  # the waiters behind it may fit
            raise

    def _admit_waiters(self) -> None:
        """Admit waiting requests in order of arrival, up to the first that does not fit."""
        while self._waiters and self._fits(self._waiters[0].peer, self._waiters[0].slots):
            first = self._waiters.popleft()
            self._count(first.peer, first.slots)
            first.is_admitted.set()

    def _fits(self, peer: str, slots: int) -> bool:
        held, left = self._held.get(peer, 0), self.capacity - self._in_use - slots
        return left >= 0 and (not held or held + slots - 1 <= _SLOTS_PER_FREE_SLOT * left)

    def _count(self, peer: str, slots: int) -> None:
        self._in_use += slots
        self._held[peer] = self._held.get(peer, 0) + slots
        if not self._held[peer]:
            del self._held[peer]

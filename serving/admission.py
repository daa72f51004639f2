"""Admission of requests: who may have how many images in progress."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from .errors import QueueFullError

_MOST_FOR_ONE_FREE = 8
"""Places that a connection may hold for each that it leaves free."""
_PACE_WEIGHT = 0.05
"""Of one image in the pace, a moving average."""


class _Waiting(NamedTuple):
    peer: str
    number: int
    is_admitted: asyncio.Event


class Places:
    """Places for the images in progress, shared out among connections.

    A connection may hold eight times as many as it leaves free: nearly all where it is alone, and
    one that comes then still finds some, and soon as many (Choudhury and Hahne, 1998). There are no
    more places than images that are computed in a given time by the pace of late, so that what
    would have to wait for long is refused at once.
    """

    def __init__(
        self,
        number: int,
        max_wait_s: float = math.inf,
        least: int = 1,
        what: str = "images in progress",
    ) -> None:
        """Have places.

        Args:
            number: Places at most, and for what comes when all are free.
            max_wait_s: Time in which as many images are computed as there are places.
            least: Places that there are at any pace, if `number` is not smaller.
            what: What they are places for, in the words of refusals.
        """
        self._number = number
        self._max_wait_s = max_wait_s
        self._least = least
        self._what = what
        self._pace_s = 0.0
        self._in_use = 0
        self._held: dict[str, int] = {}
        self._waiting: deque[_Waiting] = deque()

    @property
    def number(self) -> int:
        """The places that there are now."""
        if not self._in_use or self._pace_s * self._number <= self._max_wait_s:
            return self._number
        return min(self._number, max(self._least, int(self._max_wait_s / self._pace_s)))

    def observe(self, seconds: float) -> None:
        """Learn how long an image kept what computes busy."""
        self._pace_s += _PACE_WEIGHT * (seconds - self._pace_s)
        self._admit()

    def check(self, peer: str, number: int = 1) -> None:
        """Refuse what `take` would refuse now.

        Raises:
            QueueFullError: the connection may not hold so many.
        """
        if not self._fit(peer, number):
            held, free = self._held.get(peer, 0), max(0, self.number - self._in_use)
            raise QueueFullError(
                f"the request takes {number} of the places for {self._what}, of which "
                f"{free} are free and its connection holds {held}; try again later"
            )

    @asynccontextmanager
    async def hold(
        self, peer: str, number: int = 1, *, in_turn: bool = False
    ) -> AsyncIterator[None]:
        """Hold places within the context.

        Args:
            peer: The connection that holds them.
            number: How many, not more than there are at most.
            in_turn: Whether to wait, behind others that do, until `take` would give them.

        Raises:
            QueueFullError: the connection may not hold so many now, or as many wait as there are
                places at most.
        """
        if in_turn:
            await self._take_in_turn(peer, number)
        else:
            self.take(peer, number)
        try:
            yield
        finally:
            self.give_back(peer, number)

    def take(self, peer: str, number: int = 1) -> None:
        """Hold places until they are given back.

        Args:
            peer: The connection that holds them.
            number: How many. Where they are free, one that holds none gets them.

        Raises:
            QueueFullError: the connection may not hold so many.
        """
        self.check(peer, number)
        self._count(peer, number)

    def give_back(self, peer: str, number: int = 1) -> None:
        """Hold so many no longer."""
        self._count(peer, -number)
        self._admit()

    async def _take_in_turn(self, peer: str, number: int) -> None:
        if not self._waiting and self._fit(peer, number):
            self._count(peer, number)
        elif len(self._waiting) >= self._number:
            raise QueueFullError("as many requests wait for a place as may; try again later")
        else:
            await self._admission_of(_Waiting(peer, number, asyncio.Event()))

    async def _admission_of(self, waiting: "_Waiting") -> None:
        self._waiting.append(waiting)
        try:
            await waiting.is_admitted.wait()
        except asyncio.CancelledError:
            if waiting.is_admitted.is_set():
                self.give_back(waiting.peer, waiting.number)
            else:
                self._waiting.remove(waiting)
                self._admit()  # those behind it may fit
            raise

    def _admit(self) -> None:
        """Give places to those that wait, of which none goes before the first."""
        while self._waiting and self._fit(self._waiting[0].peer, self._waiting[0].number):
            first = self._waiting.popleft()
            self._count(first.peer, first.number)
            first.is_admitted.set()

    def _fit(self, peer: str, number: int) -> bool:
        held, left = self._held.get(peer, 0), self.number - self._in_use - number
        return left >= 0 and (not held or held + number - 1 <= _MOST_FOR_ONE_FREE * left)

    def _count(self, peer: str, number: int) -> None:
        self._in_use += number
        self._held[peer] = self._held.get(peer, 0) + number
        if not self._held[peer]:
            del self._held[peer]

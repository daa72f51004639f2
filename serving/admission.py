"""Admission of requests: who may have how many images in progress."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import QueueFullError

_MOST_FOR_ONE_FREE = 8
"""Places that a connection may hold for each that it leaves free."""
_PACE_WEIGHT = 0.05
"""Of one image in the pace, a moving average."""


class Places:
    """Places for the images in progress, shared out among connections.

    A connection may hold eight times as many as it leaves free: nearly all where it is alone, and
    one that comes then still finds some, and soon as many (Choudhury and Hahne, 1998). There are no
    more places than images that are computed in a given time by the pace of late, so that what
    would have to wait for long is refused at once.
    """

    def __init__(self, number: int, max_wait_s: float = math.inf, least: int = 1) -> None:
        """Have places.

        Args:
            number: Places at most, and for what comes when all are free.
            max_wait_s: Time in which as many images are computed as there are places.
            least: Places that there are at any pace, if `number` is not smaller.
        """
        self._number = number
        self._max_wait_s = max_wait_s
        self._least = least
        self._pace_s = 0.0
        self._in_use = 0
        self._held: dict[str, int] = {}

    @property
    def number(self) -> int:
        """The places that there are now."""
        if not self._in_use or self._pace_s * self._number <= self._max_wait_s:
            return self._number
        return min(self._number, max(self._least, int(self._max_wait_s / self._pace_s)))

    def observe(self, seconds: float) -> None:
        """Learn how long an image kept what computes busy."""
        self._pace_s += _PACE_WEIGHT * (seconds - self._pace_s)

    def check(self, peer: str, number: int = 1) -> None:
        """Refuse what `hold` would refuse now.

        Raises:
            QueueFullError: the connection may not hold so many.
        """
        held, free = self._held.get(peer, 0), self.number - self._in_use
        left = free - number
        if left < 0 or (held and held + number - 1 > _MOST_FOR_ONE_FREE * left):
            raise QueueFullError(
                f"the request takes {number} of the places for images in progress, of which "
                f"{max(0, free)} are free and its connection holds {held}; try again later"
            )

    @contextmanager
    def hold(self, peer: str, number: int = 1) -> Iterator[None]:
        """Hold places within the context.

        Args:
            peer: The connection that holds them.
            number: How many. Where they are free, one that holds none gets them.

        Raises:
            QueueFullError: the connection may not hold so many.
        """
        self.check(peer, number)
        self._held[peer] = self._held.get(peer, 0) + number
        self._in_use += number
        try:
            yield
        finally:
            self._in_use -= number
            self._held[peer] -= number
            if not self._held[peer]:
                del self._held[peer]

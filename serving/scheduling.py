"""Whose turn it is: the rules of the queue, without clock, thread or socket.

Connections take turns. An image that arrives gets the number of its turn: the one after the last
of its connection that waits, or after the present one. An image one priority lower counts eight
times, so that of two connections with much to do the one gets eight images for one of the other,
and neither waits for ever. This is self-clocked fair queueing (Golestani, 1994).
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ..model.spec import ShapeBucket
from .errors import InvalidRequestError

PRIORITIES = (1, 2, 3)
"""Levels of urgency, the highest first."""

_DEFAULT_PRIORITY = 2
_WEIGHT = 8
"""Images that a connection gets for one of another a priority lower."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RequestTerms:
    """How a request wants to be computed."""

    precision: str | None = None
    """One of those served; none, the first of them."""
    priority: int = _DEFAULT_PRIORITY
    """One of `PRIORITIES`."""
    timeout_s: float | None = None
    """The longest that the request may take; none, as long as the server allows."""
    peer: str = ""
    """The connection that it came by."""
    model: str = ""
    """The name that it asks for the model by."""

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise InvalidRequestError(
                f"priority is {self.priority}; it must be one of "
                f"{', '.join(map(str, PRIORITIES))}, of which 1 goes first"
            )
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidRequestError(
                f"the timeout is {self.timeout_s} s; it must be above 0 and finite"
            )


DEFAULT_TERMS = RequestTerms()


class BatchPolicy(NamedTuple):
    """How many images make a batch."""

    max_batch: int
    """Images at most."""
    max_delay_s: float
    """Longest wait for more images."""
    preferred: tuple[int, ...] = ()
    """Numbers of images for which a batch need not wait for more."""

    def size_of(self, waiting: int, *, overdue: bool) -> int:
        """Images to take of those waiting, 0 to wait for more.

        That is a full batch or the largest preferred one; when one of them has waited its time, as
        many as there are.
        """
        if waiting >= self.max_batch:
            return self.max_batch
        preferred = max((size for size in self.preferred if size <= waiting), default=0)
        return preferred or (waiting if overdue else 0)


@dataclass(frozen=True, eq=False)
class Ticket(Generic[T]):
    """A place in the queue."""

    item: T
    """What waits."""
    bucket: ShapeBucket
    arrival: float
    """In seconds of the caller's clock."""
    peer: str
    priority: int
    turn: int
    """The lower goes first."""


class Schedule(Generic[T]):
    """What waits for a batch, one queue a shape bucket; its callers tell it the time."""

    def __init__(self, policy: BatchPolicy, buckets: Iterable[ShapeBucket]) -> None:
        self._policy = policy
        self._queues: dict[ShapeBucket, list[Ticket[T]]] = {bucket: [] for bucket in buckets}
        self._connections: dict[tuple[str, int], list[Ticket[T]]] = {}
        self._turn = 0

    def __iter__(self) -> Iterator[Ticket[T]]:
        """All that waits; other threads may look, too."""
        return (ticket for queue in tuple(self._queues.values()) for ticket in tuple(queue))

    def add(self, item: T, bucket: ShapeBucket, terms: RequestTerms, now: float) -> Ticket[T]:
        """Put something in its place among what waits for batches of a bucket."""
        mine = self._connections.setdefault((terms.peer, terms.priority), [])
        last = mine[-1].turn if mine else 0
        turn = max(self._turn, last) + _WEIGHT ** (terms.priority - 1)
        ticket = Ticket(item, bucket, now, terms.peer, terms.priority, turn)
        mine.append(ticket)
        insort(self._queues[bucket], ticket, key=lambda other: other.turn)
        return ticket

    def discard(self, ticket: Ticket[T]) -> None:
        """Give a place up, if it is still held."""
        queue = self._queues[ticket.bucket]
        if ticket not in queue:
            return
        queue.remove(ticket)
        key = (ticket.peer, ticket.priority)
        self._connections[key].remove(ticket)
        if not self._connections[key]:
            del self._connections[key]

    def take(self, now: float, *, only_full: bool = False) -> list[Ticket[T]]:
        """The next batch, which is all of one bucket; empty while it is to wait for more.

        Of the buckets with a batch to take, it is that of the image whose turn is next.

        Args:
            now: The time.
            only_full: Take nothing if that batch is smaller than the largest; those behind it do
                not go before.
        """
        sizes = {bucket: self._size(queue, now) for bucket, queue in self._queues.items()}
        ripe = [(q[0].turn, q[0].arrival, b) for b, q in self._queues.items() if sizes[b]]
        if not ripe:
            return []
        turn, _, bucket = min(ripe)
        if only_full and sizes[bucket] < self._policy.max_batch:
            return []
        self._turn = turn
        batch = self._queues[bucket][: sizes[bucket]]
        for ticket in batch:
            self.discard(ticket)
        return batch

    def take_all(self) -> list[Ticket[T]]:
        """All that waits."""
        waiting = list(self)
        for ticket in waiting:
            self.discard(ticket)
        return waiting

    def due(self) -> float | None:
        """When something will have waited its time; none if nothing waits."""
        return min((ticket.arrival + self._policy.max_delay_s for ticket in self), default=None)

    def _size(self, queue: list[Ticket[T]], now: float) -> int:
        overdue = any(now >= ticket.arrival + self._policy.max_delay_s for ticket in queue)
        return self._policy.size_of(len(queue), overdue=overdue)

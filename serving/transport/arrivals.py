"""Messages that are on their way, of which slow clients may let any number wait."""

import asyncio
from collections import Counter
from typing import Any

import grpc

from ..errors import ExpiredError, QueueFullError, StoppingError

MESSAGES_PER_PLACE = 2
"""That a server awaits for each image that may be in progress."""


class Arrivals:
    """Waits for messages; where too many are awaited, the connection with most of them loses one.

    Clients that send slowly, or nothing, then take a bounded memory and shut no other out: what
    is sent in earnest arrives before it is the oldest.
    """

    def __init__(self, number: int) -> None:
        """Await so many messages at once."""
        self._number = number
        self._awaited: dict[asyncio.Timeout, str] = {}
        """By connection, the oldest first."""
        self._is_stopped = False

    def stop(self) -> None:
        """Give up what is awaited, and await no more."""
        self._is_stopped = True
        for limit in self._awaited:
            _give_up(limit)

    async def next(
        self, context: grpc.aio.ServicerContext[Any, Any], timeout_s: float | None
    ) -> bytes | None:
        """Await the next message of a call.

        Args:
            context: Of the call, whose messages are not deserialised.
            timeout_s: The longest to wait; none, any time.

        Returns:
            The message, or none after the last.

        Raises:
            ExpiredError: it did not arrive in time.
            QueueFullError: there were too many, and most of its connection, which awaited it
                longest.
            StoppingError: the server stops.
        """
        if self._is_stopped:
            raise _stopping()
        if len(self._awaited) >= self._number:
            self._give_up_one()
        limit = asyncio.timeout(timeout_s)
        self._awaited[limit] = context.peer()
        try:
            async with limit:
                message = await context.read()
                # The stubs do not know EOF.
                return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]
        except TimeoutError:
            if self._is_stopped:
                raise _stopping() from None
            if limit in self._awaited:
                raise ExpiredError(f"the message did not arrive within {timeout_s:g} s") from None
            raise QueueFullError(
                "the server waits for as many messages as its queue_size allows, and of this "
                "connection for this one longest; try again later"
            ) from None
        finally:
            self._awaited.pop(limit, None)

    def _give_up_one(self) -> None:
        ((peer, _),) = Counter(self._awaited.values()).most_common(1)
        oldest = next(limit for limit, other in self._awaited.items() if other == peer)
        del self._awaited[oldest]
        _give_up(oldest)


def _give_up(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(0)  # which is past


def _stopping() -> StoppingError:
    return StoppingError("the server is stopping")

"""Messages that are on their way, of which slow clients may let any number wait."""

import asyncio
from typing import Any

import grpc

from .errors import ExpiredError, QueueFullError

MESSAGES_PER_PLACE = 2
"""That a server awaits for each image that may be in progress."""


class Arrivals:
    """Waits for messages; where too many are awaited, it gives up the one awaited longest.

    Clients that send slowly, or nothing, then take a bounded memory and shut no other out: what
    is sent in earnest arrives before it is the oldest.
    """

    def __init__(self, number: int) -> None:
        """Await so many messages at once."""
        self._number = number
        self._awaited: dict[asyncio.Timeout, None] = {}
        """The oldest first."""

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
            QueueFullError: it was awaited longest when there were too many.
        """
        if len(self._awaited) >= self._number:
            self._give_up_oldest()
        limit = asyncio.timeout(timeout_s)
        self._awaited[limit] = None
        try:
            async with limit:
                message = await context.read()
                # The stubs do not know EOF.
                return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]
        except TimeoutError:
            if limit in self._awaited:
                raise ExpiredError(f"the message did not arrive within {timeout_s:g} s") from None
            raise QueueFullError(
                "the server waits for as many messages as it may, twice its queue_size, and for "
                "this one longest; try again later"
            ) from None
        finally:
            self._awaited.pop(limit, None)

    def _give_up_oldest(self) -> None:
        oldest = next(iter(self._awaited))
        del self._awaited[oldest]
        if not oldest.expired():
            oldest.reschedule(0)  # which is past

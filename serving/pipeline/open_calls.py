"""Limit on the number of open calls, shared among connections."""

from collections import Counter

from ..errors import QueueFullError

# Maximum number of open calls of a connection per call that can still be opened.
_CALLS_PER_FREE_CALL = 8


class OpenCalls:
    """Counter of the open calls of each connection, with a limit.

    The server accepts at most `limit` open calls in total. If it can accept F more calls, each
    connection may have up to 8 * F open calls (dynamic thresholds; Choudhury and Hahne, 1998). A
    single connection can thus open about 8/9 of `limit`, because F is then 1/9 of `limit`. If a
    second connection opens calls, F falls, and the first connection cannot open new calls until
    enough of its calls have ended. Each of the two connections can then have about 8/17 of `limit`.
    A call that exceeds the total or the connection's limit is rejected immediately. It does not
    wait, because calls can stay open for hours.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = Counter[str]()

    def add(self, peer: str) -> None:
        """Count a call as open until `remove` is called.

        Args:
            peer: gRPC peer of the call; it identifies the client's connection.

        Raises:
            QueueFullError: the server or the connection has too many open calls.
        """
        own, free = self._open[peer], self._limit - self._open.total() - 1
        if free < 0 or own > _CALLS_PER_FREE_CALL * free:
            raise QueueFullError(
                f"the server has {self._open.total()} open calls, {own} of them from this "
                f"connection, and accepts at most {self._limit}; try again later, or raise the "
                "server's --queue-size"
            )
        self._open[peer] += 1

    def remove(self, peer: str) -> None:
        """Stop counting a call that has ended."""
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

"""Threads for work on images, for which connections take turns."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple

from .detections import Value


class Done(NamedTuple, Generic[Value]):
    """Work that is done."""

    value: Value
    worked_s: float
    waited_s: float = 0.0
    """For a thread."""


def timed(work: Callable[..., Value], *arguments: Any) -> Done[Value]:
    """Do work here, and say how long it took."""
    start = time.perf_counter()
    value = work(*arguments)
    return Done(value, time.perf_counter() - start)


class ImageThreads:
    """A pool of threads; a connection that has much for them waits for its turn after the others.

    Of an event loop, in which all methods but `close` are called.
    """

    def __init__(self, number: int) -> None:
        """Have so many threads."""
        self.number = number
        """Of threads."""
        self._free = number
        self._executor = ThreadPoolExecutor(number, thread_name_prefix="images")
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """What waits for a thread, by connection, of which the first is the next to get one."""

    async def run(self, peer: str, work: Callable[..., Value], *arguments: Any) -> Done[Value]:
        """Do work in a thread when it is the connection's turn, and say how long it took.

        If the caller is cancelled, the work is not begun any more, or its result is dropped.
        """
        start = time.perf_counter()
        await self._turn(peer)
        waited_s = time.perf_counter() - start
        working = self._executor.submit(timed, work, *arguments)
        # The thread is taken until the work ends, whatever becomes of the caller.
        working.add_done_callback(self._end_of_work(asyncio.get_running_loop()))
        done: Done[Value] = await asyncio.wrap_future(working)
        return done._replace(waited_s=waited_s)

    def close(self) -> None:
        """Wait for the work in progress and end the threads."""
        self._executor.shutdown()

    async def _turn(self, peer: str) -> None:
        """Wait for a thread, and take it."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same moment
                self._give_back()
            raise

    def _give_back(self) -> None:
        """Let who is next have a thread."""
        while self._waiting:
            peer = next(iter(self._waiting))
            turns = self._waiting.pop(peer)
            turn = turns.popleft()
            if turns:
                self._waiting[peer] = turns  # behind the others
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1

    def _end_of_work(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future[Any]], None]:
        def end(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(self._give_back)

        return end

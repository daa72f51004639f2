"""Fair thread pool for images, and daemon threads for calls that may hang."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple

from ..detections import Value
from ..host import name_thread


class TimedResult(NamedTuple, Generic[Value]):
    """Result of a function call: its value, its duration, and its wait for a free thread."""

    value: Value
    # Duration of the call in seconds.
    elapsed_s: float
    # Seconds that the call waited for a free thread.
    waited_s: float = 0.0


def timed(work: Callable[..., Value], *arguments: Any) -> TimedResult[Value]:
    """Call a function in this thread. Return its value and its duration in seconds."""
    start = time.perf_counter()
    value = work(*arguments)
    return TimedResult(value, time.perf_counter() - start)


class FairThreadPool:
    """Thread pool whose free threads go to the waiting connections in round-robin order.

    Call its methods from one event loop only, except `close`.
    """

    def __init__(self, size: int) -> None:
        # Number of threads.
        self.size = size
        self._free = size
        self._executor = ThreadPoolExecutor(
            size, "images", initializer=name_thread, initargs=("images",)
        )
        # Calls that wait for a thread, by connection. The first connection gets the next thread.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(
        self, peer: str, work: Callable[..., Value], *arguments: Any
    ) -> TimedResult[Value]:
        """Call a function in a thread. Return its value, duration and wait for a thread (seconds).

        If the calling task is cancelled while it waits for a thread, the function is not called.
        If the task is cancelled later, the function runs to its end, and its result is dropped.

        Args:
            peer: gRPC peer of the request; it identifies the client's connection.
            work: Function to call.
            arguments: Arguments of the function.
        """
        start = time.perf_counter()
        await self._acquire_thread(peer)
        waited_s = time.perf_counter() - start
        running = self._executor.submit(timed, work, *arguments)
        # The thread is busy until the call ends, even if the caller is cancelled.
        running.add_done_callback(self._release_callback(asyncio.get_running_loop()))
        result: TimedResult[Value] = await asyncio.wrap_future(running)
        return result._replace(waited_s=waited_s)

    @property
    def busy(self) -> int:
        """Number of threads that are in use."""
        return self.size - self._free

    def close(self) -> None:
        """Wait for running calls and end the threads."""
        self._executor.shutdown()

    async def _acquire_thread(self, peer: str) -> None:
        if self._free:
            self._free -= 1
            return
        acquired = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(acquired)
        try:
            await acquired
        except asyncio.CancelledError:
            if not acquired.cancelled():  # got a thread and was cancelled in one loop iteration
                self._release_thread()
            raise

    def _release_thread(self) -> None:
        """Give a thread that is no longer in use to the next waiting call, or count it as free."""
        while self._waiting:
            peer = next(iter(self._waiting))
            queue = self._waiting.pop(peer)
            acquired = queue.popleft()
            if queue:
                self._waiting[peer] = queue  # behind the other connections
            if not acquired.cancelled():
                acquired.set_result(None)
                return
        self._free += 1

    def _release_callback(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future[Any]], None]:
        def release(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody waits
                loop.call_soon_threadsafe(self._release_thread)

        return release


async def in_daemon_thread(work: Callable[..., Value], *arguments: Any) -> Value:
    """Run a function in a daemon thread of its own and return its result.

    Use it for work that may never end, such as reading from a hanging disk or calling a hanging
    driver. Unlike `asyncio.to_thread`, it occupies no thread of a shared pool, and the process can
    exit before the work ends.

    Args:
        work: Function to run. It continues if the calling task is cancelled.
        arguments: Arguments of the function.
    """
    result: Future[Value] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=work.__qualname__, daemon=True).start()
    return await asyncio.wrap_future(result)

"""Threads for work that may never end, as that on a disk or with a driver that hangs."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_daemon_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """Do work in a thread of its own.

    Unlike those of `asyncio.to_thread`, it takes no place of other work's, and the process may end
    before it.

    Args:
        work: What to do; if the caller is cancelled, it is left to itself.
        arguments: Of the work.
    """
    result: Future[Result] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=work.__qualname__, daemon=True).start()
    return await asyncio.wrap_future(result)

"""Time that repeated calls take, by the host's clock."""

import time
from collections.abc import Callable


def durations_of(call: Callable[[], object], seconds: float, least: int = 1) -> list[float]:
    """Seconds of each call, one after the other, until their time is up.

    Args:
        call: Returns when its work is done.
        seconds: Their time.
        least: Calls that are made however long they take.
    """
    durations: list[float] = []
    before = time.perf_counter()
    end = before + seconds
    while len(durations) < least or before < end:
        call()
        after = time.perf_counter()
        durations.append(after - before)
        before = after
    return durations


def calls_per_second(queue: Callable[[], object], wait: Callable[[], object], count: int) -> float:
    """Rate of calls that are queued back to back and waited for at the end.

    Args:
        queue: May return before its work is done.
        wait: Returns when all of it is.
        count: Calls.
    """
    begin = time.perf_counter()
    for _ in range(count):
        queue()
    wait()
    return count / (time.perf_counter() - begin)

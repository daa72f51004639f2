"""An engine that does what its items say, for processes that import this module."""

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maskrcnn_trt.model.spec import ShapeBucket
from maskrcnn_trt.serving.engines.base import EngineInfo

BUCKET = ShapeBucket(8, 8)

Deed = Callable[[], Any]


class ObedientEngine:
    """Its items are calls without arguments, and their values its results."""

    def __init__(
        self, load: Deed = os.getpid, concurrency: int = 1, busy_from: int | None = None
    ) -> None:
        self._load = load
        self._concurrency = concurrency
        self._busy_from = busy_from or concurrency

    def load(self) -> EngineInfo:
        self._load()
        return EngineInfo(
            "none", "cpu", self._concurrency, self._busy_from, (BUCKET,), takes_orders=False
        )

    def warm_up(self, max_batch: int) -> None:
        """Nothing is cold."""

    def compute(self, items: Sequence[Deed]) -> list[Any]:
        return [item() for item in items]

    def close(self) -> None:
        """Nothing is held."""


def raise_error(error: BaseException) -> None:
    raise error


def log_twice() -> None:
    log = logging.getLogger("maskrcnn_trt.serving.trial")
    log.debug("too %s", "quiet")
    log.warning("loud %s", "enough")


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    threading.Event().wait()


def hang_at_second(calls: Path) -> None:
    """Hang when it is called for the second time, as a file knows."""
    with calls.open("ab") as file:
        file.write(b".")
    if calls.stat().st_size == 2:
        hang()


def objects_looked_at() -> int:
    """By collections of garbage."""
    return len(gc.get_objects())


def thread_cores() -> set[int]:
    """The cores that threads of the process may run on."""
    tasks = map(int, os.listdir("/proc/self/task"))
    return set().union(*(os.sched_getaffinity(task) for task in tasks))


def meet(own: Path, other: Path) -> int:
    """The process, once another call has come to meet this one."""
    own.touch()
    while not other.exists():
        time.sleep(0.01)
    return os.getpid()

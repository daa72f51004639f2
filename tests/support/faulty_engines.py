"""Engine that calls functions chosen by a test, for worker processes that import this module."""

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.serving.engines.base import EngineInfo

BUCKET = ShapeBucket(8, 8)

Action = Callable[[], Any]


class ActionEngine:
    """Engine that calls the items of a batch, which are functions without arguments.

    The object is also the engine's loader.
    """

    def __init__(
        self,
        on_load: Action = os.getpid,
        on_warm_up: Action = os.getpid,
        concurrency: int = 1,
        saturating_batches: int = 0,
    ) -> None:
        self._on_load = on_load
        self._on_warm_up = on_warm_up
        self.info = EngineInfo(
            "none",
            "cpu",
            concurrency,
            saturating_batches or concurrency,
            (BUCKET,),
            is_end_to_end=False,
        )

    def load(self) -> "ActionEngine":
        self._on_load()
        return self

    def warm_up(self, max_batch: int) -> None:
        self._on_warm_up()

    def compute(self, items: Sequence[Action]) -> list[Any]:
        return [item() for item in items]

    def close(self) -> None:
        """Do nothing."""


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
    """Hang in the second call. The size of the file `calls` is the number of calls."""
    with calls.open("ab") as file:
        file.write(b".")
    if calls.stat().st_size == 2:
        hang()


def tracked_objects() -> int:
    """Return the number of objects that a garbage collection scans."""
    return len(gc.get_objects())


def thread_cores() -> set[int]:
    """Return the cores on which the threads of the process may run."""
    tasks = map(int, os.listdir("/proc/self/task"))
    return set().union(*(os.sched_getaffinity(task) for task in tasks))


def meet(own: Path, other: Path) -> int:
    """Create the file `own`, and wait until another call creates `other`. Return the process ID."""
    own.touch()
    while not other.exists():
        time.sleep(0.01)
    return os.getpid()

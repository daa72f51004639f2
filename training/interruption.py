"""Interruption of a training run by SIGINT (Ctrl+C) or SIGTERM."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM ended the run, after a checkpoint was written."""


class Interruption:
    """Context manager that records SIGINT and SIGTERM, so that the current step can be completed.

    The first signal sets `requested` to True. In a `with` block of `immediate`, it also raises
    `TrainingInterrupted`. A second signal has its usual effect. If the context is entered outside
    the main thread, signals keep their usual effect.
    """

    def __init__(self) -> None:
        self.requested = False
        self._immediate = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._record) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Let the first signal end a `with` block immediately, by raising an error.

        Raises:
            TrainingInterrupted: The first signal arrived in the block, or before it.
        """
        self._immediate = True
        try:
            if self.requested:
                raise TrainingInterrupted
            yield
        finally:
            self._immediate = False

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        if self._immediate:
            raise TrainingInterrupted

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

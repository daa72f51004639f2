"""Interruption of a training run by SIGINT (Ctrl+C) or SIGTERM."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM ended the run. Before that, a checkpoint was written."""


class Interruption:
    """Context manager that records SIGINT and SIGTERM, so that the current step can be completed.

    The first signal sets `requested` to True and, if `immediate` is True, also raises
    `TrainingInterrupted`. A second signal has its usual effect. If the context is entered outside
    the main thread, signals keep their usual effect.
    """

    def __init__(self) -> None:
        self.requested = False
        # Whether the first signal also raises `TrainingInterrupted` at once. Set during
        # evaluations, which need not be completed.
        self.immediate = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._record) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        if self.immediate:
            raise TrainingInterrupted

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

"""Points in the work of a device."""

import time
from typing import Any

import torch


class Mark:
    """A point in the current stream; work that was queued before it is done when it is reached.

    On the CPU work is done at once, and marks are reached when they are made.
    """

    def __init__(self, device: torch.device) -> None:
        """Mark the current stream of a device."""
        self._time = time.perf_counter()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has come so far, busily, but let other threads run meanwhile."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self, stream: Any) -> None:
        """Make another stream wait for this mark."""
        if self._event is not None:
            stream.wait_event(self._event)

    def seconds_since(self, earlier: "Mark") -> float:
        """Time that the device took from one mark to another, once both are reached."""
        if self._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1000

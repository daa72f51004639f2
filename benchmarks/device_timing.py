"""Time that calls take on a GPU."""

import time
from collections.abc import Callable
from statistics import median

import torch

FILL_BYTES = 2**31
WARMUP = 3
REPETITIONS = 30
HOST_REPETITIONS = 3


class DeviceTimer:
    """A clock on the current GPU.

    Before each call a large tensor is filled. That empties the caches, and keeps the device busy
    until the host has queued what follows: the time that the host takes to do so does not count,
    but where a call waits for the device within.
    """

    def __init__(self) -> None:
        self._filler = torch.empty(FILL_BYTES, dtype=torch.uint8, device="cuda")

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Median time on the device from the begin of a call to the end of what it queued."""
        for _ in range(WARMUP):
            call()
        spans = []
        for _ in range(REPETITIONS):
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            self._filler.zero_()
            begin.record()
            call()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize()
        return median(float(begin.elapsed_time(end)) for begin, end in spans)

    def copy_gigabytes_per_second(self) -> float:
        """Reads and writes of copying a large tensor within the GPU."""
        source, target = self._filler.chunk(2)
        return FILL_BYTES / self.milliseconds(lambda: target.copy_(source)) / 1e6


def host_milliseconds(call: Callable[[], object]) -> float:
    """Median time on the host's clock, work that is left to the GPU included."""
    spans = []
    for _ in range(HOST_REPETITIONS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - begin)
    return 1e3 * median(spans)

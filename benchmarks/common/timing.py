"""Timing of calls and training steps, on the host's clock or with CUDA events; percentiles."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import click

from ...model.config.option_types import FiniteRange
from ...serving.config import DAY_S

if TYPE_CHECKING:
    import torch

SECONDS = FiniteRange(min=0, min_open=True, max=DAY_S)

seconds_option = click.option(
    "--seconds", type=SECONDS, default=5.0, help="Length of each measurement."
)

# Size of the tensor that `GpuTimer` fills before each timed call: much larger than an L2 cache.
_FILL_BYTES = 2**31
# Numbers of untimed and of timed calls by `GpuTimer`, and of timed calls by `host_milliseconds`.
_WARMUP_CALLS = 3
_GPU_CALLS = 30
_HOST_CALLS = 3


@dataclass(frozen=True)
class Latency:
    """Mean, percentiles and maximum of a sample of latencies, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def latency_from_seconds(seconds: Sequence[float]) -> Latency:
    """Return mean, percentiles and maximum, in milliseconds, of durations in seconds.

    Raises:
        ValueError: there are no durations.
    """
    if not seconds:
        raise ValueError("no duration was measured")
    ordered = sorted(1000 * value for value in seconds)
    p50, p90, p95, p99 = (percentile(ordered, rank) for rank in (50, 90, 95, 99))
    return Latency(math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def percentile(ordered: Sequence[float], rank: int) -> float:
    """Return the nearest-rank percentile of values.

    It is the smallest value such that at least `rank` % of all values are at or below it. It is
    always a measured value, never interpolated. With fewer than 100 values, p99 is the maximum.

    Args:
        ordered: Values in ascending order, at least one.
        rank: Per cent, 1 to 100.
    """
    return ordered[math.ceil(len(ordered) * rank / 100) - 1]


def measure_durations(
    function: Callable[[], object], seconds: float, min_calls: int = 1
) -> list[float]:
    """Call a function repeatedly and return the seconds of each call.

    Args:
        function: Function to call. It must return only when its work is complete.
        seconds: Total time after which no further call starts.
        min_calls: Minimum number of calls, made even if they take longer than `seconds`.
    """
    durations: list[float] = []
    before = time.perf_counter()
    end = before + seconds
    while len(durations) < min_calls or before < end:
        function()
        after = time.perf_counter()
        durations.append(after - before)
        before = after
    return durations


def measure_call_rate(
    enqueue: Callable[[], object], synchronize: Callable[[], object], count: int
) -> float:
    """Enqueue calls back to back, wait once until all are complete, and return calls per second.

    Args:
        enqueue: Function to call. It may return before its work is complete.
        synchronize: Function that returns when all enqueued work is complete.
        count: Number of calls of `enqueue`.
    """
    begin = time.perf_counter()
    for _ in range(count):
        enqueue()
    synchronize()
    return count / (time.perf_counter() - begin)


class GpuTimer:
    """Timer that uses CUDA events on the current GPU.

    Before each call a large tensor is filled. The fill flushes the caches, and keeps the GPU busy
    until the host has enqueued the call, so that launch overhead is not measured. If the call
    itself waits for the GPU, the wait is included.
    """

    def __init__(self) -> None:
        import torch

        self._filler = torch.empty(_FILL_BYTES, dtype=torch.uint8, device="cuda")

    def milliseconds(self, function: Callable[[], object]) -> float:
        """Return the median GPU time, in milliseconds, of a call and the work that it enqueues."""
        import torch

        for _ in range(_WARMUP_CALLS):
            function()
        spans = []
        for _ in range(_GPU_CALLS):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._filler.zero_()
            begin.record()
            function()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize()
        return median(float(begin.elapsed_time(end)) for begin, end in spans)

    def copy_gigabytes_per_second(self) -> float:
        """Return the bandwidth of a large copy in GPU memory, reads plus writes, in GB/s."""
        source, target = self._filler.chunk(2)
        return _FILL_BYTES / self.milliseconds(lambda: target.copy_(source)) / 1e6


def host_milliseconds(function: Callable[[], object]) -> float:
    """Return the median milliseconds of a call, including GPU work that it starts.

    The time is measured on the host's clock.
    """
    import torch

    spans = []
    for _ in range(_HOST_CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - begin)
    return 1e3 * median(spans)


class StepTimer:
    """Timer of consecutive training steps. It does not synchronise with the GPU at each step."""

    def __init__(self, device: "torch.device") -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """Record the time at which all work submitted to the device so far is complete.

        On a GPU this enqueues an event, without waiting for the work.
        """
        if self._on_gpu:
            import torch

            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between consecutive times that `mark` recorded."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(self._events)]
        return [b - a for a, b in itertools.pairwise(self._times)]

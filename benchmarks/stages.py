"""Where the time of a batch goes: by stage of the model, and by kernel."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..model.manifest import Precision
from .engines import Run

STAGES = ("trunk", "proposals", "box head", "selection", "mask head")
"""Backbone, pyramid and RPN head; the choice of proposals; pooling and box head; the choice and
suppression of detections; pooling and mask head."""
IDLE = "idle"
"""Time between kernels in which the GPU has nothing to do."""

_BATCHES = 10
_COSTLIEST = 15
_TOP_K = ("prune_top_k", "sort_top_k")
_POOLING = ("pyramid_roi_align",)
_FIRST_KERNELS = (_TOP_K, _POOLING, _TOP_K, _POOLING)
"""Names of the kernel that each stage but the first begins with."""


class Kernel(NamedTuple):
    """Something that the GPU did: a kernel, a copy, a fill."""

    name: str
    start: float
    """Microseconds."""
    duration: float
    """Microseconds."""


@dataclass(frozen=True)
class KernelTotal:
    """All calls of one kernel in a batch."""

    name: str
    count: int
    milliseconds: float


@dataclass(frozen=True)
class StageTimes:
    """Time of a batch on the GPU, from the begin of its first kernel to the end of its last."""

    engine: str
    precision: Precision
    batch: int
    milliseconds: dict[str, float]
    """By stage, in the order of `STAGES`, and idle; they add up to the whole."""
    costliest: Sequence[KernelTotal]
    """Kernels that take the most time, the most first."""


def milliseconds_by_stage(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Time of one batch by stage.

    A stage lasts until the first kernel of the next. Where kernels overlap, time counts for the one
    that began first.

    Args:
        kernels: Of one batch, by start; at least one.

    Returns:
        Milliseconds of every stage and of idling.
    """
    times = dict.fromkeys((*STAGES, IDLE), 0.0)
    stage, end = 0, kernels[0].start
    for kernel in kernels:
        landmarks = _FIRST_KERNELS[stage] if stage < len(_FIRST_KERNELS) else ()
        stage += any(landmark in kernel.name for landmark in landmarks)
        busy_from, kernel_end = max(end, kernel.start), kernel.start + kernel.duration
        times[IDLE] += (busy_from - end) / 1000
        times[STAGES[stage]] += max(0.0, kernel_end - busy_from) / 1000
        end = max(end, kernel_end)
    return times


def mean_milliseconds_by_stage(kernels: Sequence[Kernel], batches: int) -> dict[str, float]:
    """Time of a batch by stage, as a mean over batches that had the same kernels.

    Raises:
        ValueError: the batches differ in their kernels.
    """
    count, rest = divmod(len(kernels), batches)
    if rest or not count:
        raise ValueError(f"{len(kernels)} kernels are not those of {batches} equal batches")
    times = [milliseconds_by_stage(kernels[i : i + count]) for i in range(0, len(kernels), count)]
    return {stage: sum(own[stage] for own in times) / batches for stage in times[0]}


def costliest_kernels(kernels: Sequence[Kernel], batches: int, count: int) -> list[KernelTotal]:
    """The kernels that take the most time in equal batches; calls and time are of one of them."""
    durations: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        durations[kernel.name].append(kernel.duration)
    totals = [
        KernelTotal(name, len(own) // batches, sum(own) / batches / 1000)
        for name, own in durations.items()
    ]
    return sorted(totals, key=lambda total: -total.milliseconds)[:count]


def kernels_of(call: Callable[[], object], count: int) -> list[Kernel]:
    """What the GPU does in so many calls, by start; each call waits for its end.

    As many calls come first, in which the profiler gets ready.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    steps = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=steps, acc_events=True) as profiler:
        for _ in range(2):
            for _ in range(count):
                call()
            profiler.step()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def measure_stages(run: Run, precision: Precision, batch: int) -> StageTimes:
    """Profile a few batches on the GPU.

    Raises:
        ValueError: the batches differ in their kernels.
    """
    run.complete()  # which may do what is done once only
    kernels = kernels_of(run.complete, _BATCHES)
    return StageTimes(
        engine=run.engine,
        precision=precision,
        batch=batch,
        milliseconds=mean_milliseconds_by_stage(kernels, _BATCHES),
        costliest=costliest_kernels(kernels, _BATCHES, _COSTLIEST),
    )

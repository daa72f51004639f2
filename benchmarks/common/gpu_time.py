"""GPU time by model stage and by kind of kernel."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...model.bundle.manifest import Precision

# Stages of the model. `trunk`: backbone, FPN and RPN head. `proposals`: selection of the proposals.
# `selection`: selection and NMS of the detections. Each head includes the RoIAlign before it.
STAGES = ("trunk", "proposals", "box head", "selection", "mask head")
# Name for the time between kernels, in which the GPU does nothing.
IDLE = "idle"

# Number of profiled batches, and length of the list of the costliest kernels.
_BATCHES = 10
_COSTLIEST = 15
# Parts of the names of top-k and RoIAlign kernels.
_TOP_K = ("prune_top_k", "sort_top_k")
_POOLING = ("pyramid_roi_align",)
# For each stage after the trunk: name parts by which its first kernel is recognised.
_FIRST_KERNELS = (_TOP_K, _POOLING, _TOP_K, _POOLING)

# Kinds of kernels of a training step, each with parts of kernel names. A kernel belongs to the
# first kind with a part that occurs in the kernel's name.
_KERNEL_KINDS = {
    "element-wise": ("triton_", "elementwise", "reduce_kernel"),
    "convolutions": ("fprop", "dgrad", "wgrad", "conv"),
    "matrix products": ("gemm", "nvjet", "cutlass"),
    "RoIAlign": _POOLING,
    "optimiser": ("multi_tensor_apply",),
    "copies": ("Memcpy", "Memset"),
}
_OTHER = "other"
# Name for the time in which only NCCL (communication) kernels run.
NCCL = "NCCL"
KERNEL_KINDS = (*_KERNEL_KINDS, _OTHER, NCCL)


class GpuActivity(NamedTuple):
    """One execution of a kernel, copy or memset on the GPU."""

    name: str
    # Start and duration in microseconds.
    start: float
    duration: float


@dataclass(frozen=True)
class KernelTotal:
    """Number of calls and total time of one GPU kernel in a batch."""

    name: str
    count: int
    milliseconds: float


@dataclass(frozen=True)
class StageTimes:
    """Mean GPU time of a batch by model stage.

    The batch lasts from the start of its first kernel to the end of its last kernel.
    """

    engine: str
    precision: Precision
    batch: int
    # Time by stage in the order of `STAGES`, then idle time. Their sum is the batch's time.
    milliseconds: dict[str, float]
    # Kernels with the most time, in descending order.
    costliest: Sequence[KernelTotal]


def measure_stages(
    run: Callable[[], object], engine: str, precision: Precision, batch: int
) -> StageTimes:
    """Profile several runs of a batch. Return the mean GPU time of a run by stage and kernel.

    Args:
        run: function that runs the batch on a loaded engine, and waits for the GPU.
        engine: name of the engine, for the result.
        precision: precision of the engine, for the result.
        batch: number of images in the batch, for the result.

    Raises:
        ValueError: the number of recorded GPU activities is 0 or not a multiple of the number of
            runs.
    """
    run()  # one-time work, such as graph capture, stays out of the profile
    activities = profile_gpu(run, _BATCHES)
    return StageTimes(
        engine=engine,
        precision=precision,
        batch=batch,
        milliseconds=mean_milliseconds_by_stage(activities, _BATCHES),
        costliest=costliest_kernels(activities, _BATCHES, _COSTLIEST),
    )


def profile_gpu(function: Callable[[], object], count: int) -> list[GpuActivity]:
    """Call `function` 2 * `count` times, and return the GPU activities of the second half.

    The first `count` calls warm up the profiler. `function` must return only after the GPU has
    finished.

    Returns:
        The activities, ordered by start time.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    steps = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=steps, acc_events=True) as profiler:
        for _ in range(2):
            for _ in range(count):
                function()
            profiler.step()
    activities = [
        GpuActivity(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return sorted(activities, key=lambda activity: activity.start)


def busy_microseconds(activities: Sequence[GpuActivity]) -> float:
    """Return the total microseconds in which at least one GPU activity runs.

    The activities must be ordered by start time.
    """
    return sum(busy for _, _, busy in _timeline(activities))


def _timeline(activities: Sequence[GpuActivity]) -> Iterator[tuple[GpuActivity, float, float]]:
    """Yield each activity, the idle time before it, and its busy time, in microseconds.

    If two activities overlap, the overlap is busy time of only the one that started first.
    """
    end = activities[0].start if activities else 0.0
    for activity in activities:
        start, stop = max(end, activity.start), activity.start + activity.duration
        yield activity, start - end, max(0.0, stop - start)
        end = max(end, stop)


def communication_milliseconds(activities: Sequence[GpuActivity]) -> float:
    """Return the milliseconds of a training step in which NCCL kernels run.

    `activities` are the GPU activities of the step, ordered by start time.
    """
    return busy_microseconds([x for x in activities if _is_communication(x)]) / 1000


def milliseconds_by_stage(activities: Sequence[GpuActivity]) -> dict[str, float]:
    """Return the GPU milliseconds of each model stage, and of idle time, in one batch.

    The keys are `STAGES` and `IDLE`. A stage contains all kernels up to the first kernel of the
    next stage. If two kernels overlap, the time of the overlap counts for the kernel that started
    first.

    Args:
        activities: GPU activities of one batch, ordered by start time; at least one.
    """
    times = dict.fromkeys((*STAGES, IDLE), 0.0)
    stage = 0
    for activity, idle, busy in _timeline(activities):
        next_stage = _FIRST_KERNELS[stage] if stage < len(_FIRST_KERNELS) else ()
        stage += any(name in activity.name for name in next_stage)
        times[IDLE] += idle / 1000
        times[STAGES[stage]] += busy / 1000
    return times


def milliseconds_by_kind(activities: Sequence[GpuActivity]) -> dict[str, float]:
    """Return the GPU milliseconds of a training step by kind of kernel, and of idle time.

    The keys are `KERNEL_KINDS` and `IDLE`. The values sum up to the duration of the step: if NCCL
    and another kernel overlap, the time of the overlap counts for the other kernel.

    Args:
        activities: GPU activities of a step, ordered by start time.
    """
    times = dict.fromkeys((*KERNEL_KINDS, IDLE), 0.0)
    others = [x for x in activities if not _is_communication(x)]
    times[NCCL] = (busy_microseconds(activities) - busy_microseconds(others)) / 1000
    for activity, _, busy in _timeline(others):
        times[_kind(activity.name)] += busy / 1000
    times[IDLE] = sum(idle for _, idle, _ in _timeline(activities)) / 1000
    return times


def _kind(name: str) -> str:
    kinds = (kind for kind, parts in _KERNEL_KINDS.items() if any(part in name for part in parts))
    return next(kinds, _OTHER)


def _is_communication(activity: GpuActivity) -> bool:
    return activity.name.startswith("nccl")


def mean_milliseconds_by_stage(activities: Sequence[GpuActivity], batches: int) -> dict[str, float]:
    """Return the mean of `milliseconds_by_stage` over several equal batches.

    Args:
        activities: GPU activities of all batches, ordered by start time.
        batches: number of batches. Each has the same number of activities.

    Raises:
        ValueError: the number of activities is 0 or not a multiple of the number of batches.
    """
    count, rest = divmod(len(activities), batches)
    if rest or not count:
        raise ValueError(
            f"the profiler recorded {len(activities)} GPU kernels in {batches} equal batches, but "
            "all batches must have the same number of kernels, at least one; measure again"
        )
    times = [
        milliseconds_by_stage(activities[i : i + count]) for i in range(0, len(activities), count)
    ]
    return {stage: sum(own[stage] for own in times) / batches for stage in times[0]}


def costliest_kernels(
    activities: Sequence[GpuActivity], batches: int, count: int
) -> list[KernelTotal]:
    """Return the `count` kernels with the most GPU time, with calls and milliseconds per batch.

    `activities` contains the GPU activities of `batches` equal batches.
    """
    durations: dict[str, list[float]] = defaultdict(list)
    for activity in activities:
        durations[activity.name].append(activity.duration)
    totals = [
        KernelTotal(name, len(own) // batches, sum(own) / batches / 1000)
        for name, own in durations.items()
    ]
    return sorted(totals, key=lambda total: -total.milliseconds)[:count]

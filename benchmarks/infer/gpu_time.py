"""GPU time by model stage and kernel, NCCL time of a training step, and throughput roofline."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ...model.bundle.manifest import Precision
from ...model.bundle.spec import ShapeBucket
from ...model.config.schema import ModelConfig
from ..common.timing import measure_call_rate, measure_durations
from .runners import BatchRun

# Stages of the model. `trunk`: backbone, FPN and RPN head. `proposals`: selection of the proposals.
# `selection`: selection and NMS of the detections. Each head includes the RoIAlign before it.
STAGES = ("trunk", "proposals", "box head", "selection", "mask head")
# Name for the time between kernels, in which the GPU does nothing.
IDLE = "idle"

# Number of profiled batches, and length of the list of the costliest kernels.
_BATCHES = 10
_COSTLIEST = 15
# Parts of the names of the kernels by which the stages are recognized.
_TOP_K = ("prune_top_k", "sort_top_k")
_POOLING = ("pyramid_roi_align",)
# For each stage after the trunk: parts of possible names of its first kernel.
_FIRST_KERNELS = (_TOP_K, _POOLING, _TOP_K, _POOLING)

# Rows and columns of the matrices whose product sets the roofline.
MATMUL_SIDE = 8192


class GpuActivity(NamedTuple):
    """One run of a kernel, copy or fill on the GPU."""

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


@dataclass(frozen=True)
class MatmulRoofline:
    """Upper bound of a model's throughput, derived from the GPU's rate of matrix products.

    It assumes that the GPU computes only the model's convolutions and matrix products.
    """

    precision: Precision
    # Measured rate of the product of two large square matrices.
    teraflops_per_second: float
    # Operations of the model's convolutions and matrix products. A multiply-add counts as two.
    flops_per_image: int

    @property
    def images_per_second(self) -> float:
        """Upper bound of the throughput, in images per second."""
        return 1e12 * self.teraflops_per_second / self.flops_per_image


def measure_stages(run: BatchRun, precision: Precision, batch: int) -> StageTimes:
    """Profile several runs of a batch. Return the mean GPU time of a run by stage and kernel.

    Args:
        run: batch to run, on a loaded engine.
        precision: precision of the engine, for the result.
        batch: number of images in the batch, for the result.

    Raises:
        ValueError: the runs did not all start the same number of GPU activities.
    """
    run.run()  # one-time work, such as graph capture, stays out of the profile
    activities = profile_gpu(run.run, _BATCHES)
    return StageTimes(
        engine=run.engine,
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
    busy, end = 0.0, float("-inf")
    for activity in activities:
        own_end = activity.start + activity.duration
        busy += max(0.0, own_end - max(end, activity.start))
        end = max(end, own_end)
    return busy


def communication_milliseconds(activities: Sequence[GpuActivity]) -> tuple[float, float]:
    """Return the NCCL time of a training step.

    Args:
        activities: GPU activities of a step, ordered by start time.

    Returns:
        Milliseconds in which NCCL kernels run, and milliseconds in which only NCCL kernels run.
    """
    nccl = [activity for activity in activities if activity.name.startswith("nccl")]
    others = [activity for activity in activities if not activity.name.startswith("nccl")]
    exposed = busy_microseconds(activities) - busy_microseconds(others)
    return busy_microseconds(nccl) / 1000, exposed / 1000


def milliseconds_by_stage(activities: Sequence[GpuActivity]) -> dict[str, float]:
    """Return the GPU milliseconds of each model stage, and of idle time, in one batch.

    The keys are `STAGES` and `IDLE`. A stage lasts until the first kernel of the next stage. If two
    kernels overlap, the time of the overlap counts for the kernel that started first.

    Args:
        activities: GPU activities of one batch, ordered by start time; at least one.
    """
    times = dict.fromkeys((*STAGES, IDLE), 0.0)
    stage, end = 0, activities[0].start
    for activity in activities:
        next_stage = _FIRST_KERNELS[stage] if stage < len(_FIRST_KERNELS) else ()
        stage += any(name in activity.name for name in next_stage)
        busy_from, busy_to = max(end, activity.start), activity.start + activity.duration
        times[IDLE] += (busy_from - end) / 1000
        times[STAGES[stage]] += max(0.0, busy_to - busy_from) / 1000
        end = max(end, busy_to)
    return times


def mean_milliseconds_by_stage(activities: Sequence[GpuActivity], batches: int) -> dict[str, float]:
    """Return the mean of `milliseconds_by_stage` over several equal batches.

    Args:
        activities: GPU activities of all batches, ordered by start time.
        batches: number of batches. Each has the same number of activities.

    Raises:
        ValueError: the number of activities is not a multiple of the number of batches.
    """
    count, rest = divmod(len(activities), batches)
    if rest or not count:
        raise ValueError(
            f"the profiler recorded {len(activities)} GPU kernels in {batches} equal batches, but "
            f"the number of kernels must be a multiple of {batches}; run the measurement again"
        )
    times = [
        milliseconds_by_stage(activities[i : i + count]) for i in range(0, len(activities), count)
    ]
    return {stage: sum(own[stage] for own in times) / batches for stage in times[0]}


def costliest_kernels(
    activities: Sequence[GpuActivity], batches: int, count: int
) -> list[KernelTotal]:
    """Return calls and milliseconds per batch of the `count` kernels with the most GPU time.

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


def measure_matmul_rooflines(
    precisions: Sequence[Precision], config: ModelConfig, bucket: ShapeBucket
) -> Iterator[MatmulRoofline]:
    """Yield the upper bound of a model's throughput on the current GPU, once per precision.

    Without a GPU, yield nothing. `bucket` is the model's input size.
    """
    import torch

    if not torch.cuda.is_available():
        return
    flops = flops_per_image(config, bucket)
    for precision in precisions:
        yield MatmulRoofline(precision, matmul_teraflops(precision, MATMUL_SIDE, "cuda"), flops)


def flops_per_image(config: ModelConfig, bucket: ShapeBucket) -> int:
    """Return the number of floating-point operations for one image of the size `bucket`.

    Only convolutions and matrix products count. A multiply-add counts as two operations. The model
    runs on the meta device, so nothing is computed.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from ...model.mask_rcnn import MaskRCNN

    with torch.device("meta"):
        model = MaskRCNN(config).eval()
        images = torch.empty(1, 3, *bucket, dtype=torch.uint8)
        sizes = torch.empty(1, 2, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.detect(images, sizes)
    flops: int = counter.get_total_flops()
    return flops


def matmul_teraflops(precision: Precision, side: int, device: str, seconds: float = 0.5) -> float:
    """Return the rate of the product of two matrices [side, side] in 10^12 operations per second.

    Args:
        precision: Precision of the product. `tf32` enables TF32 in this process, and every other
            precision disables it.
        side: Number of rows and of columns of each matrix.
        device: `cuda` or `cpu`.
        seconds: Length of the measurement, after a warm-up of the same length.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    enqueue = partial(torch.mm, left, right, out=torch.empty_like(left))

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def run() -> None:
        enqueue()
        synchronize()

    count = len(measure_durations(run, seconds))
    return 2 * side**3 * measure_call_rate(enqueue, synchronize, count) / 1e12

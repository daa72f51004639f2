"""Table, plots and notes of the training benchmark, as a `Record`."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..common.record import PlotGrid, Record, ResultTable
from .measure import GpuSteps, TrainResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each point of a smoothed loss curve is the mean over 1 / _WINDOWS of the steps.
_WINDOWS = 25
_COLOURS = {"fp32": "tab:blue", "tf32": "tab:orange", "fp16": "tab:green", "bf16": "tab:red"}
_COLUMNS = (
    *("precision", "model", "images/s", "ratio", "p50", "p90", "p99"),
    *("data", "host", "kernels", "NCCL", "exposed", "first", "MiB", "loss"),
)

_METHOD_NOTE = """\
Every run has a process of its own, starts with the same weights and uses the same batches. A step
lasts from the end of the previous one to its own end: waiting for the next batch, its transfer to
the device, forward and backward pass, optimiser. The first {warmup} of {iterations} steps are not
timed. Latencies are of a step, in ms. "ratio" is that to torchvision's model, "data" the fraction
of the time in which the process waited for the next batch, "host" the time in which it starts a
step on an idle GPU, in ms, "kernels" their number on the GPU, "NCCL" the time in which those that
communicate run, in ms, "exposed" the part of it in which no other kernel runs, "first" the seconds
of the first step, "MiB" the peak {memory}, and "loss" the mean over the last tenth of the steps.
With several processes, "images/s" is of all of them, and the other columns are of rank 0.
"""
_TORCHVISION_NOTE = """\
Torchvision's model has the same initial weights, optimiser and images. It draws its own samples,
keeps its memory layout, and averages some losses over images instead of the batch.
"""


def train_record(results: Sequence[TrainResult]) -> Record:
    """Return a record of at least one run; all runs have the same number of steps."""
    from ...model.losses import LOSS_NAMES

    first = results[0]
    on_gpu = first.device == "cuda"
    note = _METHOD_NOTE.format(
        warmup=first.warmup,
        iterations=first.iterations,
        memory="allocated by torch" if on_gpu else "resident memory of the process",
    )
    with_torchvision = any(result.engine == "torchvision" for result in results)
    return Record(
        subject="train",
        title=f"Training in {', '.join(dict.fromkeys(r.precision for r in results))}",
        results=results,
        tables=[
            ResultTable(
                heading=f"{first.batch} images per step, {first.iterations} steps per run, "
                f"{first.processes} x {first.device}; latencies of a step in ms",
                columns=_COLUMNS,
                rows=[_row(r, _baseline(r, results)) for r in results],
            )
        ],
        plots=PlotGrid(
            alt="Loss curves side by side",
            plots=[
                partial(_plot_loss, results=results, index=index, name=name)
                for index, name in ((None, "total"), *enumerate(LOSS_NAMES))
            ],
            columns=3,
            size=(4.7, 3.75),
            title=f"Training losses of {first.batch} images per step, means of "
            f"{_window(first.iterations)} steps",
        ),
        notes=[note, *([_TORCHVISION_NOTE] if with_torchvision else [])],
        on_gpu=on_gpu,
    )


def _baseline(result: TrainResult, results: Sequence[TrainResult]) -> TrainResult | None:
    """Return torchvision's result in the same precision, if there is one."""
    same = (r for r in results if (r.engine, r.precision) == ("torchvision", result.precision))
    return next(same, None)


def _row(result: TrainResult, baseline: TrainResult | None) -> tuple[str, ...]:
    latency, rate, gpu = result.latency, result.images_per_second, result.gpu
    return (
        result.precision,
        result.engine,
        f"{rate:.1f}",
        "" if baseline is None else f"{rate / baseline.images_per_second:.2f}",
        *(f"{ms:.1f}" for ms in (latency.p50, latency.p90, latency.p99)),
        f"{result.data_share:.0%}",
        *(("",) * 4 if gpu is None else _gpu_columns(gpu)),
        f"{result.first_step_seconds:.1f}",
        f"{result.peak_memory_mib:.0f}",
        f"{result.final_loss:.3f}",
    )


def _gpu_columns(gpu: GpuSteps) -> tuple[str, ...]:
    milliseconds = (f"{ms:.2f}" for ms in (gpu.communication_ms, gpu.exposed_ms))
    return (f"{gpu.host_ms:.1f}", f"{gpu.kernels}", *milliseconds)


def _plot_loss(axes: "Axes", results: Sequence[TrainResult], index: int | None, name: str) -> None:
    """Plot the smoothed curve of one loss for each run. index None: the total loss."""
    import numpy as np

    for result in results:
        losses = np.array(result.losses)
        values = losses.sum(axis=1) if index is None else losses[:, index]
        window = _window(len(values))
        means = np.convolve(values, np.full(window, 1 / window), mode="valid")
        is_baseline = result.engine != "this"
        axes.plot(
            np.arange(window, len(values) + 1) - (window - 1) / 2,
            means,
            label=f"{result.precision} {result.engine}" if is_baseline else result.precision,
            color=_COLOURS[result.precision],
            linestyle="--" if is_baseline else "-",
            linewidth=1.3,
        )
    axes.set_title(f"{name.removeprefix('loss_')} loss")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if index is None:
        axes.legend()


def _window(steps: int) -> int:
    return max(1, steps // _WINDOWS)

"""Tables, plots and notes of the training benchmark, as a `Record`."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...model.plurals import counted
from ..common.gpu_time import IDLE, KERNEL_KINDS, NCCL
from ..common.machine import MatmulRoofline
from ..common.record import PlotGrid, Record, ResultTable, plot_stacked_bars
from .measure import GpuSteps, TrainEngine, TrainPrecision, TrainResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each point of a smoothed loss curve is the mean over 1 / _WINDOWS of the steps.
_WINDOWS = 25
_COLOURS = {"fp32": "tab:blue", "tf32": "tab:orange", "fp16": "tab:green", "bf16": "tab:red"}
_LINES = {"this": "-", "eager": ":", "torchvision": "--"}
_COLUMNS = (
    *("precision", "model", "seed", "images/s", "ratio", "of roofline", "p50", "p90", "p99"),
    *("data", "host", "kernels", "NCCL", "exposed", "first", "MiB", "loss"),
)

_METHOD_NOTE = """\
Every run uses new processes. Runs of one seed have the same initial weights and batches. A
step includes the wait for the next batch, the transfer of the batch to the device, forward and
backward pass, and the optimiser. The first {warmup} of {iterations} steps are not timed. The table
with the throughput has these columns:
"""
_COLUMN_MEANINGS = {
    "model": '"this": this project\'s model as configured; "eager": the same model without '
    'compilation; "torchvision": torchvision\'s Mask R-CNN',
    "images/s": "throughput of all processes together; the other columns are measured in the "
    "process of rank 0",
    "ratio": "throughput divided by that of torchvision's model in the same precision and with the "
    "same seed",
    "p50, p90, p99": "latency of a step, in ms",
    "data": "waiting time for the next batch, as a fraction of the total time of the timed steps",
    "host": "time in ms that the process needs to launch a step on an idle GPU",
    "kernels": "number of kernels, copies and fills of a step",
    "NCCL": "time in ms in which NCCL kernels run during a step",
    "exposed": 'part of "NCCL" in which the GPU does nothing else',
    "first": "duration of the first step in seconds",
    "MiB": "peak {memory}",
    "loss": "mean of the total loss over the last tenth of the steps",
}
_ROOFLINE_MEANINGS = {
    "of roofline": "throughput as a fraction of an upper bound, which a paragraph below defines",
}
_ROOFLINE_NOTE = """\
The column "of roofline" has the throughput divided by an upper bound. The upper bound assumes that
a GPU computes only convolutions and matrix products. A training step is assumed to have three times
the operations of inference: one third in the forward pass, two thirds in the backward pass. A
training step then has {flops:.3g} TFLOP per image, with a multiply-add as two operations. The
assumed rate is that of an 8192x8192x8192 matrix product in the same precision: {rates}.
"""
_KINDS_NOTE = """\
The GPU time by kind of kernel comes from a profile of one step. "element-wise" includes reductions.
"convolutions" are kernels whose names contain "conv", "fprop", "dgrad" or "wgrad". Convolutions
that run as matrix products count as "matrix products". "RoIAlign" has only this project's kernels;
torchvision's RoIAlign counts as "other". "NCCL" is the time in which only communication kernels
run. "idle" is the time between kernels.
"""
_TORCHVISION_NOTE = """\
Torchvision's model is trained with the same initial weights, optimiser and images as this project's
model. It draws its own random samples of anchors and proposals. Its tensors stay in NCHW layout.
"""


def train_record(
    results: Sequence[TrainResult], rooflines: Sequence[MatmulRoofline] = ()
) -> Record:
    """Return the tables, plots and notes of one run of the training benchmark.

    Args:
        results: Runs, at least one. All have the same number of steps.
        rooflines: Upper bounds of the throughput of one GPU, at most one per precision.
    """
    from ...model.losses import LOSS_NAMES

    first = results[0]
    on_gpu = first.device == "cuda"
    bounds = {r.precision: first.processes * r.images_per_second for r in rooflines}
    return Record(
        subject="train",
        title=f"Training in {', '.join(dict.fromkeys(r.precision for r in results))}",
        results=results,
        tables=[
            ResultTable(
                heading=f"{counted(first.batch, 'image')} per step, "
                f"{counted(first.iterations, 'step')} per run, "
                f"{first.processes} x {first.device}; latencies of a step in ms",
                columns=_COLUMNS,
                rows=[_row(r, _baseline(r, results), bounds.get(r.precision)) for r in results],
            ),
            *([_average_precision_table(results)] if first.metrics else []),
            *([_kinds_table(results)] if on_gpu else []),
        ],
        plots=PlotGrid(
            alt="Loss curves side by side",
            plots=[
                *(
                    partial(_plot_loss, results=results, index=index, name=name)
                    for index, name in ((None, "total"), *enumerate(LOSS_NAMES))
                ),
                *([partial(_plot_kinds, results=results)] if on_gpu else []),
            ],
            columns=3,
            size=(4.7, 3.75),
            title=f"Training losses of {counted(first.batch, 'image')} per step, means of "
            f"{_window(first.iterations)} steps",
        ),
        notes=_notes(results, rooflines),
        on_gpu=on_gpu,
        details={"rooflines": rooflines},
    )


def _notes(
    results: Sequence[TrainResult], rooflines: Sequence[MatmulRoofline]
) -> list[str | dict[str, str]]:
    first = results[0]
    on_gpu = first.device == "cuda"
    memory = "GPU memory reserved by torch" if on_gpu else "resident memory of the process"
    meanings = _COLUMN_MEANINGS | (_ROOFLINE_MEANINGS if rooflines else {})
    notes: list[str | dict[str, str]] = [
        _METHOD_NOTE.format(warmup=first.warmup, iterations=first.iterations),
        {name: text.format(memory=memory) for name, text in meanings.items()},
    ]
    if rooflines:
        rates = ", ".join(f"{r.precision} {r.teraflops_per_second:.0f} TFLOP/s" for r in rooflines)
        notes.append(_ROOFLINE_NOTE.format(flops=rooflines[0].flops_per_image / 1e12, rates=rates))
    if on_gpu:
        notes.append(_KINDS_NOTE)
    if any(result.engine == "torchvision" for result in results):
        notes.append(_TORCHVISION_NOTE)
    return notes


def _baseline(result: TrainResult, results: Sequence[TrainResult]) -> TrainResult | None:
    """Return torchvision's result with the precision and seed of `result`, or None if missing."""
    key = ("torchvision", result.precision, result.seed)
    same = (r for r in results if (r.engine, r.precision, r.seed) == key)
    return next(same, None)


def _row(result: TrainResult, baseline: TrainResult | None, bound: float | None) -> tuple[str, ...]:
    latency, rate, gpu = result.latency, result.images_per_second, result.gpu
    return (
        result.precision,
        result.engine,
        f"{result.seed}",
        f"{rate:.1f}",
        "" if baseline is None else f"{rate / baseline.images_per_second:.2f}",
        "" if bound is None else f"{rate / bound:.1%}",
        *(f"{ms:.1f}" for ms in (latency.p50, latency.p90, latency.p99)),
        f"{result.data_share:.0%}",
        *(("",) * 4 if gpu is None else _gpu_columns(gpu)),
        f"{result.first_step_seconds:.1f}",
        f"{result.peak_memory_mib:.0f}",
        f"{result.final_loss:.3f}",
    )


def _kinds_table(results: Sequence[TrainResult]) -> ResultTable:
    kinds = (*KERNEL_KINDS, IDLE)
    return ResultTable(
        heading="GPU time of a step by kind of kernel, in ms",
        columns=("precision", "model", "seed", *kinds),
        rows=[
            (r.precision, r.engine, f"{r.seed}", *(f"{r.gpu.kinds_ms[kind]:.2f}" for kind in kinds))
            for r in results
            if r.gpu is not None
        ],
        on_terminal=False,
    )


def _average_precision_table(results: Sequence[TrainResult]) -> ResultTable:
    rows = []
    for (precision, engine), runs in _by_model(results).items():
        metrics = ([run.metrics[name] for run in runs] for name in ("bbox/AP", "segm/AP"))
        rows.append((precision, engine, f"{len(runs)}", *map(_mean_and_deviation, metrics)))
    return ResultTable(
        heading="Average precision after the runs: mean, and standard deviation over the seeds",
        columns=("precision", "model", "seeds", "box AP", "mask AP"),
        rows=rows,
    )


def _mean_and_deviation(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


_Runs = dict[tuple[TrainPrecision, TrainEngine], list[TrainResult]]


def _by_model(results: Sequence[TrainResult]) -> _Runs:
    """Group training runs by (precision, engine). Each group has one run per seed."""
    runs = defaultdict(list)
    for result in results:
        runs[result.precision, result.engine].append(result)
    return runs


def _gpu_columns(gpu: GpuSteps) -> tuple[str, ...]:
    milliseconds = (f"{ms:.2f}" for ms in (gpu.communication_ms, gpu.kinds_ms[NCCL]))
    return (f"{gpu.host_ms:.1f}", f"{gpu.kernels}", *milliseconds)


def _plot_loss(axes: "Axes", results: Sequence[TrainResult], index: int | None, name: str) -> None:
    """Plot one loss, averaged over the seeds, as a smoothed curve per precision and model.

    Args:
        axes: axes to draw into.
        results: all runs.
        index: column of the loss in `TrainResult.losses`. None: plot the total loss.
        name: name of the loss, for the title.
    """
    import numpy as np

    for (precision, engine), runs in _by_model(results).items():
        losses = np.mean([run.losses for run in runs], axis=0)
        values = losses.sum(axis=1) if index is None else losses[:, index]
        window = _window(len(values))
        means = np.convolve(values, np.full(window, 1 / window), mode="valid")
        axes.plot(
            np.arange(window, len(values) + 1) - (window - 1) / 2,
            means,
            label=precision if engine == "this" else f"{precision} {engine}",
            color=_COLOURS[precision],
            linestyle=_LINES[engine],
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


def _plot_kinds(axes: "Axes", results: Sequence[TrainResult]) -> None:
    """Plot the GPU time of a step by kind of kernel: a stacked bar per precision and model."""
    bars = {f"{r.engine}\n{r.precision}": r.gpu.kinds_ms for r in results if r.gpu is not None}
    plot_stacked_bars(axes, bars, {IDLE: "lightgrey"})
    axes.set_title("GPU time of a step")
    axes.set_ylabel("ms")
    legend = axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    # The legend is beside the bars. As a part of the layout, it would widen its column of plots.
    legend.set_in_layout(False)

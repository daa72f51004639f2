"""`maskrcnn bench train`: training speed and losses by precision."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from ...model.plurals import counted
from ..common.record import (
    PlotGrid,
    Record,
    ResultTable,
    json_option,
    output_option,
    publish,
)
from .measure import (
    GpuSteps,
    TrainEngine,
    TrainPeer,
    TrainPrecision,
    TrainResult,
    TrainSettings,
    measure_training,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each point of a smoothed loss curve is the mean over 1 / _WINDOWS of the steps.
_WINDOWS = 25
_COLOURS = {"fp32": "tab:blue", "tf32": "tab:orange", "fp16": "tab:green", "bf16": "tab:red"}
_LINES = {"this": "-", "eager": ":", "torchvision": "--"}
_COLUMNS = (
    *("precision", "model", "seed", "images/s", "ratio", "p50", "p90", "p99"),
    *("data", "host", "kernels", "NCCL", "exposed", "first", "MiB", "loss"),
)

_METHOD_NOTE = """\
Every run uses new processes. Runs of one seed have the same initial weights and batches. A
step includes the wait for the next batch, the transfer of the batch to the device, forward and
backward pass, and the optimiser. The first {warmup} of {iterations} steps are not timed. The table
of runs has these columns:
"""
_COLUMN_MEANINGS = {
    "images/s": "throughput; with several processes, the sum over all of them (other columns: of "
    "rank 0)",
    "ratio": "throughput divided by that of torchvision's model",
    "p50, p90, p99": "latency of a step, in ms",
    "data": "fraction of the time in which the process waited for the next batch",
    "host": "time in ms that the process needs to launch a step on an idle GPU",
    "kernels": "number of kernels, copies and fills of a step",
    "NCCL": "time in ms in which NCCL kernels run during a step",
    "exposed": 'part of "NCCL" in which the GPU does nothing else',
    "first": "duration of the first step in seconds",
    "MiB": "peak {memory}",
    "loss": "mean of the total loss over the last tenth of the steps",
}
_TORCHVISION_NOTE = """\
Torchvision's model is trained with the same initial weights, optimiser and images as this project's
model. It draws its own random samples of anchors and proposals. Its tensors stay in NCHW layout.
"""


@click.command(context_settings={"show_default": True})
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(get_args(TrainPrecision)),
    help="Repeatable. Default: all that the device supports.",
)  # fmt: skip
@click.option(
    "--peer", "peers", multiple=True, type=click.Choice(get_args(TrainPeer)),
    help="Baseline: also train torchvision's model, or the same model without compilation. "
    "Repeatable.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), default=1, help="Runs with consecutive seeds.")
@click.option("--evaluate", is_flag=True, help="Measure the average precision after each run.")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs; short for device=0,1,...")
@click.option("--use-synthetic-data", is_flag=True, help="Train on synthetic images.")
@click.option("--iterations", type=click.IntRange(min=1), default=100, help="Steps of each run.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=10, help="Untimed first steps of each run."
)
@json_option
@output_option("a page, plots of the losses")
def train(
    config: str,
    overrides: tuple[str, ...],
    precisions: tuple[TrainPrecision, ...],
    peers: tuple[TrainPeer, ...],
    seeds: int,
    evaluate: bool,
    gpus: int | None,
    use_synthetic_data: bool,
    iterations: int,
    warmup: int,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Train a configuration in several precisions, and compare speed and losses.

    CONFIG and KEY=VALUE are those of `maskrcnn train`. Runs of one seed start from the same weights
    and use the same batches. No run writes a checkpoint.
    """
    from ...training.config import load_config
    from ...training.data.synthetic.dataset import with_synthetic_data
    from ...training.distributed import local_device

    if warmup >= iterations:
        raise click.UsageError(
            f"--warmup {warmup} leaves none of the {iterations} iterations to time; lower "
            "--warmup, or raise --iterations"
        )
    if gpus is not None:
        overrides += (f"device={','.join(map(str, range(gpus)))}",)
    train_config = load_config(config, overrides)
    if use_synthetic_data:
        train_config = with_synthetic_data(train_config)
    if not precisions:
        on_gpu = local_device(train_config.device).type == "cuda"
        precisions = get_args(TrainPrecision) if on_gpu else ("fp32", "bf16")
    settings = TrainSettings(
        precisions=precisions,
        iterations=iterations,
        warmup=warmup,
        peers=peers,
        seeds=seeds,
        with_average_precision=evaluate,
    )
    results: list[TrainResult] = []
    try:
        for result in measure_training(
            train_config,
            settings,
            on_run=lambda engine, precision: click.echo(
                f"measuring {engine} in {precision} ...", err=True
            ),
        ):
            click.echo(f"  {result.images_per_second:.1f} images/s", err=True)
            results.append(result)
    finally:
        # If a run fails or is interrupted, keep the results of those before it.
        if results:
            publish(train_record(results), json_path, output)


def train_record(results: Sequence[TrainResult]) -> Record:
    """Return the tables, plots and notes of one run of the training benchmark.

    `results` must have at least one item. All runs must have the same number of steps.
    """
    from ...model.losses import LOSS_NAMES

    first = results[0]
    on_gpu = first.device == "cuda"
    memory = "GPU memory reserved by torch" if on_gpu else "resident memory of the process"
    notes: list[str | dict[str, str]] = [
        _METHOD_NOTE.format(warmup=first.warmup, iterations=first.iterations),
        {name: text.format(memory=memory) for name, text in _COLUMN_MEANINGS.items()},
    ]
    with_torchvision = any(result.engine == "torchvision" for result in results)
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
                rows=[_row(r, _baseline(r, results)) for r in results],
            ),
            *([_average_precision_table(results)] if first.metrics else []),
        ],
        plots=PlotGrid(
            alt="Loss curves side by side",
            plots=[
                partial(_plot_loss, results=results, index=index, name=name)
                for index, name in ((None, "total"), *enumerate(LOSS_NAMES))
            ],
            columns=3,
            size=(4.7, 3.75),
            title=f"Training losses of {counted(first.batch, 'image')} per step, means of "
            f"{_window(first.iterations)} steps",
        ),
        notes=[*notes, *([_TORCHVISION_NOTE] if with_torchvision else [])],
        on_gpu=on_gpu,
    )


def _baseline(result: TrainResult, results: Sequence[TrainResult]) -> TrainResult | None:
    """Return torchvision's result with the precision and seed of `result`, or None if missing."""
    key = ("torchvision", result.precision, result.seed)
    same = (r for r in results if (r.engine, r.precision, r.seed) == key)
    return next(same, None)


def _row(result: TrainResult, baseline: TrainResult | None) -> tuple[str, ...]:
    latency, rate, gpu = result.latency, result.images_per_second, result.gpu
    return (
        result.precision,
        result.engine,
        f"{result.seed}",
        f"{rate:.1f}",
        "" if baseline is None else f"{rate / baseline.images_per_second:.2f}",
        *(f"{ms:.1f}" for ms in (latency.p50, latency.p90, latency.p99)),
        f"{result.data_share:.0%}",
        *(("",) * 4 if gpu is None else _gpu_columns(gpu)),
        f"{result.first_step_seconds:.1f}",
        f"{result.peak_memory_mib:.0f}",
        f"{result.final_loss:.3f}",
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
    milliseconds = (f"{ms:.2f}" for ms in (gpu.communication_ms, gpu.exposed_ms))
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

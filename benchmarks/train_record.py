"""The record of a training benchmark: a page, a picture of the losses, and all numbers as JSON."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from ..model.losses import LOSS_NAMES
from .record import begin_record, markdown_table, record_page
from .report import TRAIN_COLUMNS, Report, train_rows
from .train import TrainResult

mpl.use("Agg")
from matplotlib import pyplot as plt

_WINDOWS = 25
_COLOURS = {"fp32": "tab:blue", "tf32": "tab:orange", "fp16": "tab:green", "bf16": "tab:red"}

_PEER = """\
Torchvision's model has the same initial weights, optimiser and images. It draws its own samples,
keeps its memory layout, and averages some losses over images, not the batch.
"""
_COUNTED = """\
Every run has a process of its own, begins with the same weights and sees the same batches. A step
lasts from the end of the one before to its own end: waiting for the next batch, its way to the
device, forward and backward pass, optimiser. The first {warmup} of {iterations} steps are not
timed. Latencies are of a step, in ms; "data" is the share of the time in which the process waited
for the next batch, "MiB" the peak {memory}, "loss" the mean of the last tenth of the steps.
"""


def write_record(report: Report, results: Sequence[TrainResult], folder: Path) -> Path:
    """Write `train-<gpu>-<yyyymm>.md`, and `.png` and `.json` beside it.

    Args:
        report: where, when and how they were measured.
        results: the runs, all of one length.
        folder: made if it does not exist.

    Returns:
        The page.
    """
    page = begin_record("train", report, folder)
    plot_losses(results, page.with_suffix(".png"))
    page.write_text(_page(report, results, page.with_suffix(".png").name))
    return page


def plot_losses(results: Sequence[TrainResult], picture: Path) -> None:
    """Draw every loss of all runs over their steps, smoothed, into a PNG."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), layout="constrained", sharex=True)
    for cell, name in zip(axes.flat, ("loss", *LOSS_NAMES), strict=True):
        for result in results:
            losses = np.array(result.losses)
            values = losses.sum(axis=1) if name == "loss" else losses[:, LOSS_NAMES.index(name)]
            _plot_smoothed(cell, values, result)
        cell.set_title("total loss" if name == "loss" else name.removeprefix("loss_"))
        cell.set_ylim(bottom=0)
        cell.grid(alpha=0.3)
    for cell in axes[-1]:
        cell.set_xlabel("step")
    axes[0, 0].legend()
    window = _window(results[0].iterations)
    figure.suptitle(f"Training losses of {results[0].batch} images a step, means of {window} steps")
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _plot_smoothed(cell: Axes, values: NDArray[np.float64], result: TrainResult) -> None:
    window = _window(len(values))
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    peer = result.engine != "this"
    cell.plot(
        np.arange(window, len(values) + 1) - (window - 1) / 2,
        means,
        label=f"{result.precision} {result.engine}" if peer else result.precision,
        color=_COLOURS[result.precision],
        linestyle="--" if peer else "-",
        linewidth=1.3,
    )


def _window(steps: int) -> int:
    """Steps that a point of a curve is the mean of."""
    return max(1, steps // _WINDOWS)


def _page(report: Report, results: Sequence[TrainResult], picture: str) -> str:
    first = results[0]
    on_gpu = first.device == "cuda"
    counted = _COUNTED.format(
        warmup=first.warmup,
        iterations=first.iterations,
        memory="that torch allocated" if on_gpu else "resident memory of the process",
    )
    if any(result.engine == "torchvision" for result in results):
        counted += _PEER
    return record_page(
        f"Training in {', '.join(dict.fromkeys(r.precision for r in results))}",
        report,
        on_gpu=on_gpu,
        body=[
            f"\n{first.batch} images a step, {first.iterations} steps a run.\n",
            markdown_table(TRAIN_COLUMNS, train_rows(results)),
            f"\n![Loss curves side by side]({picture})",
        ],
        counted=[counted],
    )

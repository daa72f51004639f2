"""`maskrcnn bench kernels`: times of the CUDA kernels and of other implementations."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.record import (
    PlotGrid,
    Record,
    ResultTable,
    format_significant,
    format_verdict,
    json_option,
    output_option,
    publish,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .measure import BaselineResult, KernelGoal, KernelResult

COLUMNS = ("kernel", "size", "ms", "GB/s", "of copying", "baselines", "speedup", "goal")

_SIZES_NOTE = """\
The input sizes are those of a model with a batch of 8 images of 800x1344 pixels. For RoIAlign,
BxRxPxP means B images, R RoIs per image, and PxP bins per RoI. For NMS, "NxK, at most M" means N
sets of K boxes, and at most M boxes kept of each set. For `paste_rle`, "N at HxW" means N masks,
each pasted into an image of HxW pixels. The table of kernel times has these columns:
"""
_COLUMN_MEANINGS = {
    "ms": "median time of a kernel on the GPU",
    "GB/s": 'minimum memory traffic (inputs read once, outputs written once) divided by "ms"',
    "of copying": '"GB/s" as a fraction of {copying} GB/s, the bandwidth (reads plus writes) of '
    "copying a gibibyte in the same run; above 100% if the kernel leaves much of its input unread",
    "baselines": "other implementations of the kernel's task, with times in ms; those with * run "
    "on the CPU, at least in part",
    "speedup": "time of each baseline divided by that of the kernel",
}
_TIMER_NOTE = """\
Before each call that is timed with CUDA events, a large tensor is filled on the GPU. The fill
flushes the caches, and keeps the GPU busy until the host has enqueued the call, so that the launch
overhead is not measured. If a baseline synchronises with the GPU during the call, its time includes
the synchronisation. Baselines with * are timed on the host's clock instead, without the fill; their
time is the median of three calls.
"""
_TORCHVISION_NOTE = """\
Torchvision's RoIAlign is measured with features in NCHW, its fastest layout, and does not support
bf16. In the rows `pyramid_roi_align_backward`, torchvision's time is that of the backward pass
alone. Torchvision's NMS processes one image at a time, and returns all boxes that survive.
"""
_RLE_NOTE = """\
The kernel `paste_rle` returns run lengths in GPU memory. The kernel `compress_runs` encodes them as
COCO RLE strings. In the row `paste_rle`, the time of the kernel does not include this encoding, but
the times of all baselines include it.
"""


@click.command()
@click.option(
    "--kernel", "names", multiple=True, metavar="NAME",
    help="Kernel to measure; repeatable. Default: all kernels.",
)  # fmt: skip
@json_option
@output_option("a page, a plot of the speedups")
def kernels(names: tuple[str, ...], json_path: Path | None, output: Path | None) -> None:
    """Measure the CUDA kernels and other implementations of their tasks.

    The inputs have the sizes that occur with a batch of 8 images of 800x1344 pixels.
    """
    import torch

    from .cases import KERNEL_CASES, working_cases
    from .measure import Workload, measure_kernels

    for name in names:
        if name not in KERNEL_CASES:
            known = ", ".join(KERNEL_CASES)
            raise click.BadParameter(f"there is no kernel {name!r}; choose from {known}")
    if not torch.cuda.is_available():
        raise click.UsageError(
            "torch finds no NVIDIA GPU to measure kernels on; use a machine where nvidia-smi lists "
            "one"
        )
    results = measure_kernels(
        working_cases(Workload(), names or KERNEL_CASES),
        on_case=lambda case: click.echo(f"measuring {case.kernel}: {case.size} ...", err=True),
    )
    publish(kernels_record(results), json_path, output)


def kernels_record(results: Sequence["KernelResult"]) -> Record:
    """Return the tables, plots and notes of one run of the kernel benchmark.

    `results` must have at least one item. All must be measured on the same GPU.
    """
    limits = dict.fromkeys((result.kernel, result.limit) for result in results)
    copying = format_significant(results[0].copy_gigabytes_per_second)
    bars = [
        (f"{result.kernel}  {result.size}", baseline.name, result.speedup(baseline))
        for result in results
        for baseline in result.peers
    ]
    return Record(
        subject="kernels",
        title="CUDA kernels at working sizes",
        results=results,
        tables=[
            ResultTable(heading="Times", columns=COLUMNS, rows=[kernel_row(r) for r in results]),
            ResultTable(
                heading="Bottleneck of each kernel",
                columns=("kernel", "bound by"),
                rows=[(f"`{kernel}`", limit) for kernel, limit in limits],
                on_terminal=False,
            ),
        ],
        plots=PlotGrid(
            alt="Speed of each kernel relative to its baselines",
            plots=[partial(_plot_speedups, bars=bars)],
            size=(12, 1.5 + 0.24 * len(bars)),
        ),
        goals=[
            _goal_sentence(result, result.goal) for result in results if result.goal is not None
        ],
        notes=[
            _SIZES_NOTE,
            {name: text.format(copying=copying) for name, text in _COLUMN_MEANINGS.items()},
            _TIMER_NOTE,
            _TORCHVISION_NOTE,
            _RLE_NOTE,
        ],
        on_gpu=True,
    )


def kernel_row(result: "KernelResult") -> tuple[str, ...]:
    """Return a result's table cells, in the order of `COLUMNS`."""
    goal = ""
    if result.goal is not None:
        goal = f"{_format_goal(result.goal)}: {format_verdict(result.meets_goal)}"
    return (
        result.kernel,
        result.size,
        format_significant(result.milliseconds),
        format_significant(result.gigabytes_per_second),
        f"{result.bandwidth_share:.1%}",
        ", ".join(map(_format_baseline, result.peers)),
        ", ".join(format_significant(result.speedup(baseline)) for baseline in result.peers),
        goal,
    )


def _format_goal(goal: "KernelGoal") -> str:
    """Format a kernel's goal: maximum time and, if set, minimum speedup over the first baseline.

    For example, `< 0.6 ms, >= 5 times` means less than 0.6 ms and at least 5 times the speed of
    the first baseline.
    """
    text = f"< {goal.milliseconds:g} ms"
    return text if goal.times_peer is None else f"{text}, >= {goal.times_peer:g} times"


def _format_baseline(result: "BaselineResult") -> str:
    return f"{result.name} {format_significant(result.milliseconds)}{'*' if result.on_host else ''}"


def _goal_sentence(result: "KernelResult", goal: "KernelGoal") -> str:
    reached = f"takes {format_significant(result.milliseconds)} ms"
    if goal.times_peer is not None:
        baseline = result.peers[0]
        speedup = format_significant(result.speedup(baseline))
        reached += f" and is {speedup} times as fast as {baseline.name}"
    return (
        f"`{result.kernel}`, {result.size}: {reached}; the goal ({_format_goal(goal)}) "
        f"is {format_verdict(result.meets_goal)}."
    )


def _plot_speedups(axes: "Axes", bars: Sequence[tuple[str, str, float]]) -> None:
    """Plot one bar per (kernel and size, baseline, speedup), with one colour per baseline."""
    names = list(dict.fromkeys(name for _, name, _ in bars))
    for name in names:
        rows = [row for row, bar in enumerate(bars) if bar[1] == name]
        speedups = [bars[row][2] for row in rows]
        drawn = axes.barh(rows, [speedup - 1 for speedup in speedups], left=1, label=name)
        axes.bar_label(drawn, [format_significant(speedup) for speedup in speedups], padding=3)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.margins(x=0.08)
    # Bars start at 1, so the automatic limits would cut off speedups below 1.
    axes.set_xlim(left=min([1, *(speedup for *_, speedup in bars)]) / 2)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("times as fast as the baseline")
    if names:
        axes.figure.legend(loc="outside upper right", ncols=4)

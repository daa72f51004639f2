"""The record of a kernel benchmark: a page, a picture of the ratios, and all numbers as JSON."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from .kernels import KernelResult
from .record import begin_record, markdown_table, record_page
from .report import KERNEL_COLUMNS, Report, goal_text, in_figures, kernel_rows

mpl.use("Agg")
from matplotlib import pyplot as plt

_COLUMNS = """\
Sizes are those of a batch of 8 images of 800x1344 pixels: of RoIs BxRxPxP, of sets of boxes NxK,
where P is the side of a pooled RoI. "ms" is the median time on the device. "GB/s" is the least
memory traffic, inputs read once and outputs written once, by that time, and "of copying" its share
of the {copying} GB/s, reads and writes, that copying a gibibyte reached in the same run; it exceeds
100% where few RoIs leave much of the features unread. Peers are given in ms; "times" is how many
times as fast as each of them the kernel is.
"""
_CLOCK = """\
Before each call a large tensor is filled. That empties the caches, and keeps the GPU busy until the
host has queued the call, so that what the host takes to do so does not count, but where a call
waits for the GPU within, as some of the peers do. Peers with * work on the host, at least in part:
they are called three times, and the median is of the host's clock.
"""
_PEERS = """\
Torchvision's pooling was given its own best layout, NCHW, whatever ours was given, and boxes in the
features' type; in bf16 it has none. Its gradient is that of its whole pooling, without the forward
pass. Its suppression takes one image at a time, as its models do, and keeps as many boxes as
survive. `paste_rle` ends with run lengths on the GPU; making strings of them, which pycocotools'
time includes, is left to `compress_runs`.
"""


def write_record(report: Report, results: Sequence[KernelResult], folder: Path) -> Path:
    """Write `kernels-<gpu>-<yyyymm>.md`, and `.png` and `.json` beside it.

    Args:
        report: where, when and how they were measured.
        results: the cases, at least one.
        folder: made if it does not exist.

    Returns:
        The page.
    """
    page = begin_record("kernels", report, folder)
    plot_ratios(results, page.with_suffix(".png"))
    page.write_text(_page(report, results, page.with_suffix(".png").name))
    return page


def plot_ratios(results: Sequence[KernelResult], picture: Path) -> None:
    """Draw how many times as fast as its peers each kernel is, a bar a peer, into a PNG."""
    bars = [
        (f"{result.kernel}  {result.size}", peer.name, result.times(peer))
        for result in results
        for peer in result.peers
    ]
    names = list(dict.fromkeys(name for _, name, _ in bars))
    figure, axes = plt.subplots(figsize=(12, 1.5 + 0.24 * len(bars)), layout="constrained")
    for name in names:
        places = [place for place, bar in enumerate(bars) if bar[1] == name]
        ratios = [bars[place][2] for place in places]
        drawn = axes.barh(places, [ratio - 1 for ratio in ratios], left=1, label=name)
        axes.bar_label(drawn, [in_figures(ratio) for ratio in ratios], padding=3)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.margins(x=0.08)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("times as fast as the peer")
    if names:
        figure.legend(loc="outside upper right", ncols=4)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def goal_sentences(results: Sequence[KernelResult]) -> list[str]:
    """A sentence a goal: what was reached, what was wanted, whether that is met."""
    return [_goal_sentence(result) for result in results if result.goal is not None]


def _goal_sentence(result: KernelResult) -> str:
    assert result.goal is not None
    reached = f"{in_figures(result.milliseconds)} ms"
    if result.goal.times_peer is not None:
        peer = result.peers[0]
        reached += f" and {in_figures(result.times(peer))} times as fast as {peer.name}"
    verdict = "met" if result.meets_goal else "missed"
    return (
        f"`{result.kernel}`, {result.size}: {reached}; the goal, {goal_text(result.goal)}, "
        f"is {verdict}."
    )


def _page(report: Report, results: Sequence[KernelResult], picture: str) -> str:
    limits = dict.fromkeys((result.kernel, result.limit) for result in results)
    copying = in_figures(results[0].copy_gigabytes_per_second)
    return record_page(
        "CUDA kernels at working sizes",
        report,
        on_gpu=True,
        goals=goal_sentences(results),
        body=[
            "\n## Times\n",
            markdown_table(KERNEL_COLUMNS, kernel_rows(results)),
            f"\n![How many times as fast as its peers each kernel is]({picture})\n",
            "## What binds each kernel\n",
            markdown_table(("kernel", "bound by"), [(f"`{k}`", limit) for k, limit in limits]),
        ],
        counted=[_COLUMNS.format(copying=copying), _CLOCK, _PEERS],
    )

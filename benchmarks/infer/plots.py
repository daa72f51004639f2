"""Plots of the inference benchmark."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...model.bundle.manifest import Precision
from ..common.record import PlotGrid
from .gpu_time import IDLE, STAGES, StageTimes
from .measure import InferResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "fp32": "tab:blue",
    "tf32": "tab:orange",
    "fp16": "tab:green",
    "bf16": "tab:red",
    "int8": "tab:purple",
    "fp8": "tab:brown",
}
_LINE_STYLES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP"


def infer_plots(
    results: Sequence[InferResult], stages: Sequence[StageTimes], goals: Sequence[int]
) -> PlotGrid:
    """Return the plots of throughput and of GPU time by stage.

    Args:
        results: Measurements, at least one.
        stages: GPU times by model stage. Empty: the plot of the stages is left out.
        goals: Goals of the throughput in images/s, drawn as lines.
    """
    plots: list[Callable[[Axes], None]] = [partial(_plot_throughput, results=results, goals=goals)]
    if stages:
        plots.append(partial(_plot_stages, stages=stages))
    return PlotGrid(
        alt="Throughput over batch size", plots=plots, columns=len(plots), size=(8, 6.5)
    )


def _plot_throughput(axes: "Axes", results: Sequence[InferResult], goals: Sequence[int]) -> None:
    """Plot throughput over batch size: a colour per precision, a line style per engine."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    curves: dict[tuple[str, Precision], list[InferResult]] = defaultdict(list)
    for r in results:
        curves[r.engine if r.data == "device" else f"{r.engine}, host", r.precision].append(r)
    engines = list(dict.fromkeys(engine for engine, _ in curves))
    for (engine, precision), own in curves.items():
        axes.plot(
            [r.batch for r in own],
            [r.images_per_second for r in own],
            color=_COLOURS[precision],
            **_line_style(engines.index(engine)),
        )
    for goal in goals:
        axes.axhline(goal, color="black", linewidth=0.8)
        axes.annotate(f"{goal}", (1.01, goal), xycoords=("axes fraction", "data"), va="center")
    batches = sorted({r.batch for r in results})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(xlabel="images per batch", ylabel="images per second")
    axes.set_title(f"Throughput at {results[0].bucket} pixels")
    axes.grid(alpha=0.3, which="both")
    keys = [Line2D([], [], color=_COLOURS[p], label=p) for p in dict.fromkeys(p for _, p in curves)]
    keys += [Line2D([], [], color="grey", label=e, **_line_style(i)) for i, e in enumerate(engines)]
    axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=5)


def _line_style(index: int) -> dict[str, Any]:
    return {
        "linestyle": _LINE_STYLES[index % len(_LINE_STYLES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4,
    }


def _plot_stages(axes: "Axes", stages: Sequence[StageTimes]) -> None:
    labels = [str(times.batch) for times in stages]
    bottoms = [0.0] * len(stages)
    for stage in (*STAGES, IDLE):
        heights = [times.milliseconds[stage] / times.batch for times in stages]
        colour = "lightgrey" if stage == IDLE else None
        axes.bar(labels, heights, bottom=bottoms, label=stage, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(xlabel="images per batch", ylabel="ms per image")
    axes.set_title(f"Time by stage, {stages[0].engine} in {stages[0].precision}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6)

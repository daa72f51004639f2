"""The record of an inference benchmark: a page, a picture of the speed, and all numbers as JSON."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from ..model.manifest import Precision
from .infer import InferResult
from .record import begin_record, markdown_table, paragraphs, record_page
from .report import (
    INFER_COLUMNS,
    InferReport,
    asked_precisions,
    failure_sentences,
    in_figures,
    infer_rows,
)
from .stages import IDLE, STAGES, StageTimes

mpl.use("Agg")
from matplotlib import pyplot as plt

_COLOURS = {"fp32": "tab:blue", "tf32": "tab:orange", "fp16": "tab:green", "bf16": "tab:red"}
_STYLES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP"
_MET_ON = re.compile(r"\b(H100|H200)\b")
"""GPUs that the goals hold for, at the input size `_MET_AT`."""
_MET_AT = "800x1344"
_SPEED_GOALS = (450, 700)
"""Images a second at batch 8 in fp16: the first bar, and the goal."""
_LATENCY_GOALS = (5, 3)
"""Milliseconds at batch 1 in fp16, likewise."""
_MEMORY_GOAL = 6
"""Gigabytes at batch 8 in fp16."""

_COUNTED = """\
Every engine has a process of its own in each precision, is loaded once for the largest batch, and
measured at the smallest batch first. Latencies are of a batch, in ms, from its begin to its end,
each batch begun when the last was complete. "images/s" is measured after that, with as many batches
queued back to back and one wait at the end. "data" is where the images lie before the clock starts
and the detections are when it stops: on the device that computes, or in arrays on the host, so that
copying counts. "found" is the mean number of detections an image.
"""
_PEER = """\
Torchvision's model is measured as it ships: it scales the images, pastes the masks into them, and
waits for the GPU within; the more it finds, the longer it takes. "times" is how many times as fast
as torchvision in the same precision at the same batch size.
"""
_MEMORY = """\
"MiB" is the peak at that batch size, with what smaller ones left behind. Of torch it is what its
allocator reserved on the GPU, which leaves out CUDA's context and the code of kernels; with * it is
all that the driver says is in use on the GPU, which has them in it; on the CPU it is the resident
memory of the process.
"""
_FLOOR = """\
"floor" is the share of the throughput that the GPU would reach if only the multiplications took
time: {flops:.3g} TFLOP an image in convolutions and matrix products, two a multiplication and
addition, nothing else counted, at the rate of an 8192x8192x8192 product in the same precision,
measured in the same run: {rates}.
"""
_STAGES = """\
From a profile of {engine} in {precision}: ten batches that replay what was captured. A stage lasts
until the first kernel of the next: the first top-k ends the trunk (backbone, pyramid, RPN head),
the first pooling the choice of proposals, the next top-k the box head, the second pooling the
choice and suppression of detections; the rest is the mask head. "idle" is time between kernels.
"""


def write_record(report: InferReport, folder: Path) -> Path:
    """Write `infer-<gpu>-<yyyymm>.md`, and `.png` and `.json` beside it.

    Args:
        report: what was measured, where, when and how; at least one result.
        folder: made if it does not exist.

    Returns:
        The page.
    """
    page = begin_record("infer", report, folder)
    picture = page.with_suffix(".png")
    plot_speed(report, picture)
    page.write_text(_page(report, picture.name))
    return page


def plot_speed(report: InferReport, picture: Path) -> None:
    """Draw throughput over batch size, and where it is known the time by stage, into a PNG."""
    columns = 2 if report.stages else 1
    figure, axes = plt.subplots(
        1, columns, figsize=(8 * columns, 6.5), layout="constrained", squeeze=False
    )
    _plot_throughput(axes[0, 0], report)
    if report.stages:
        _plot_stages(axes[0, 1], report.stages)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _plot_throughput(axes: Axes, report: InferReport) -> None:
    curves: dict[tuple[str, Precision], list[InferResult]] = defaultdict(list)
    for r in report.results:
        curves[r.engine if r.data == "device" else f"{r.engine}, host", r.precision].append(r)
    ways = list(dict.fromkeys(way for way, _ in curves))
    for (way, precision), results in curves.items():
        axes.plot(
            [r.batch for r in results],
            [r.images_per_second for r in results],
            color=_COLOURS[precision],
            **_style(ways.index(way)),
        )
    if _has_goals(report):
        for goal in _SPEED_GOALS:
            axes.axhline(goal, color="black", linewidth=0.8)
            axes.annotate(f"{goal}", (1.01, goal), xycoords=("axes fraction", "data"), va="center")
    batches = sorted({r.batch for r in report.results})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(xlabel="images a batch", ylabel="images a second")
    axes.set_title(f"Throughput at {report.results[0].bucket} pixels")
    axes.grid(alpha=0.3, which="both")
    keys = [Line2D([], [], color=_COLOURS[p], label=p) for p in dict.fromkeys(p for _, p in curves)]
    keys += [Line2D([], [], color="grey", label=w, **_style(i)) for i, w in enumerate(ways)]
    axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=5)


def _style(place: int) -> dict[str, Any]:
    """How the curve of an engine is drawn, whatever its colour."""
    return {
        "linestyle": _STYLES[place % len(_STYLES)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 4,
    }


def _plot_stages(axes: Axes, measured: Sequence[StageTimes]) -> None:
    labels = [str(times.batch) for times in measured]
    bottoms = [0.0] * len(measured)
    for stage in (*STAGES, IDLE):
        heights = [times.milliseconds[stage] / times.batch for times in measured]
        colour = "lightgrey" if stage == IDLE else None
        axes.bar(labels, heights, bottom=bottoms, label=stage, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(xlabel="images a batch", ylabel="ms an image")
    axes.set_title(f"Time by stage, {measured[0].engine} in {measured[0].precision}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6)


def goal_sentences(report: InferReport) -> list[str]:
    """What was reached, what was wanted, and whether that is met; none on other machines."""
    if not _has_goals(report):
        return []
    own = {r.batch: r for r in report.results if _is_own(r)}
    sentences = []
    if 8 in own:
        speed, memory = own[8].images_per_second, own[8].peak_memory_mib * 2**20 / 1e9
        verdicts = [f"{goal} is {_verdict(speed >= goal)}" for goal in _SPEED_GOALS]
        sentences += [
            f"Batch 8 in fp16 reaches {in_figures(speed)} images/s: the bar of {verdicts[0]}, the "
            f"goal of {verdicts[1]}.",
            f"Batch 8 in fp16 takes {in_figures(memory)} GB: the bar of {_MEMORY_GOAL} GB is "
            f"{_verdict(memory < _MEMORY_GOAL)}.",
        ]
    if 1 in own:
        latency = own[1].latency.p50
        verdicts = [f"{goal} ms is {_verdict(latency < goal)}" for goal in _LATENCY_GOALS]
        sentences.append(
            f"Batch 1 in fp16 takes {in_figures(latency)} ms: the bar of {verdicts[0]}, the goal "
            f"of {verdicts[1]}."
        )
    return sentences


def _has_goals(report: InferReport) -> bool:
    gpus = report.machine.gpus
    return bool(gpus and _MET_ON.search(gpus[0])) and report.results[0].bucket == _MET_AT


def _is_own(result: InferResult) -> bool:
    return (result.engine, result.data, result.device) == ("torch", "device", "cuda") and (
        result.precision == "fp16"
    )


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def _page(report: InferReport, picture: str) -> str:
    precisions = asked_precisions(report.results, report.failures)
    failures = "\n".join(f"- {sentence}" for sentence in failure_sentences(report.failures))
    tables = [
        f"\n### {precision}\n\n"
        + markdown_table(
            INFER_COLUMNS, infer_rows(precision, report.results, report.failures, report.floors)
        )
        for precision in precisions
    ]
    return record_page(
        f"Inference in {', '.join(precisions)} at {report.results[0].bucket} pixels",
        report,
        on_gpu=any(r.device == "cuda" for r in report.results),
        goals=goal_sentences(report),
        body=[
            "\n## Speed",
            *tables,
            f"\n![Throughput over batch size]({picture})",
            *(["\n## Not measured\n", failures] if failures else []),
            *(_stage_parts(report.stages) if report.stages else []),
        ],
        counted=_texts(report),
    )


def _stage_parts(measured: Sequence[StageTimes]) -> list[str]:
    """Sections about the time by stage and by kernel."""
    names = (*STAGES, IDLE)
    rows = [(str(t.batch), *(f"{t.milliseconds[name]:.3f}" for name in names)) for t in measured]
    shown = next((t for t in measured if t.batch == 8), measured[-1])
    kernels = [(f"`{k.name}`", str(k.count), f"{k.milliseconds:.3f}") for k in shown.costliest]
    text = _STAGES.format(engine=shown.engine, precision=shown.precision)
    return [
        "\n## Time by stage, in ms\n",
        markdown_table(("batch", *names), rows),
        f"\n{paragraphs(text)}",
        f"\n## Costliest kernels of a batch of {shown.batch}\n",
        markdown_table(("kernel", "calls", "ms"), kernels),
    ]


def _texts(report: InferReport) -> list[str]:
    texts = [_COUNTED]
    if any(r.engine == "torchvision" for r in report.results):
        texts.append(_PEER)
    texts.append(_MEMORY)
    if report.floors:
        rates = ", ".join(
            f"{f.precision} {in_figures(f.teraflops_per_second)} TFLOP/s" for f in report.floors
        )
        texts.append(_FLOOR.format(flops=report.floors[0].flops_per_image / 1e12, rates=rates))
    return texts

"""Tables, plots, goals and notes of the inference benchmark, as a `Record`."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...model.bundle.manifest import Precision
from ..common.gpu_time import IDLE, STAGES, StageTimes
from ..common.machine import MachineInfo, MatmulRoofline, describe_machine
from ..common.record import (
    PlotGrid,
    Record,
    ResultTable,
    format_significant,
    format_verdict,
    plot_stacked_bars,
)
from .measure import InferFailure, InferResult, Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "engine", "data", "batch", "images/s", "p50", "p90", "p99", "MiB", "boxes", "speedup",
    "of roofline",
)  # fmt: skip
# GPUs and input size that the goals apply to.
_GOAL_GPUS = re.compile(r"\b(H100|H200)\b")
_GOAL_BUCKET = "800x1344"
# Goals in images per second at batch 8 in fp16: required minimum and target.
_SPEED_GOALS = (450, 700)
# Goals in milliseconds at batch 1 in fp16: required maximum and target.
_LATENCY_GOALS = (5, 3)
# Goal in gigabytes at batch 8 in fp16: maximum of the peak GPU memory.
_MEMORY_GOAL = 6
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

_METHOD_NOTE = """\
An engine, such as "torch" or "torchvision", is one implementation of the model; "torch" is the
torch program of a bundle. Each engine is measured in a process of its own for each precision, in
ascending order of batch sizes. Latency is measured first: each batch starts when the previous one
is complete. If an engine can queue batches on a GPU, the throughput is then measured with the same
number of batches, which are queued back to back, with one wait at the end. Otherwise, the
throughput comes from the latencies.
"""
_COLUMNS_NOTE = "The tables of speed have these columns:"
_COLUMN_MEANINGS = {
    "data": "memory that holds the images before a batch and the detections after it; with `host`, "
    "the times include copies to and from the GPU",
    "images/s": "throughput",
    "p50, p90, p99": "latency of a batch, in ms",
    "MiB": "peak memory at a batch size, including memory kept from smaller batches: GPU memory "
    "reserved by torch's allocator, without CUDA context and kernel code; with *, all GPU memory "
    "in use according to the driver; on a CPU, resident memory of the process",
    "boxes": "mean number of detections per image",
}
_TORCHVISION_MEANINGS = {
    "speedup": "throughput divided by that of torchvision's model in the same precision at the "
    "same batch size",
}
_ROOFLINE_MEANINGS = {
    "of roofline": "throughput as a fraction of an upper bound, which the next paragraph defines",
}
_TORCHVISION_NOTE = """\
The time of torchvision's model includes scaling the images, pasting the masks and synchronising
with the GPU, and grows with the number of detections.
"""
_ROOFLINE_NOTE = """\
The upper bound assumes that the GPU computes only the model's convolutions and matrix products:
{flops:.3g} TFLOP per image, with a multiply-add as two operations. The assumed rate is that of an
8192x8192x8192 matrix product in the same run and precision: {rates}.
"""
_STAGES_NOTE = """\
The time by stage comes from a GPU profile of the engine "{engine}" in {precision}. In the profile,
captured CUDA graphs are replayed for ten batches. The table has these columns:
"""
_STAGE_MEANINGS = {
    "trunk": "backbone, FPN and RPN head",
    "proposals": "selection of the proposals, from the first top-k kernel on",
    "box head": "from the first RoIAlign kernel on",
    "selection": "selection and NMS of the detections, from the first top-k kernel after the box "
    "head on",
    "mask head": "from the second RoIAlign kernel on",
    "idle": "time between kernels",
}


def infer_record(
    results: Sequence[InferResult],
    failures: Sequence[InferFailure] = (),
    rooflines: Sequence[MatmulRoofline] = (),
    stages: Sequence[StageTimes] = (),
    machine: MachineInfo | None = None,
) -> Record:
    """Return a record of one run of the inference benchmark.

    Args:
        results: Measurements, at least one. All have the same input size.
        failures: Engines that could not be measured.
        rooflines: Upper bounds of the throughput, from `measure_rooflines`.
        stages: GPU times by model stage. All are of the same engine.
        machine: machine of the measurement. None: describe this machine.
    """
    machine = machine or describe_machine()
    asked = [*(r.precision for r in results), *(f.precision for f in failures)]
    precisions = list(dict.fromkeys(asked))
    bucket = results[0].bucket
    goals = infer_goals(results, machine)
    labels = _engine_labels([*results, *failures])
    tables = [
        ResultTable(
            heading=f"Speed in {precision}, latencies in ms",
            columns=COLUMNS,
            rows=speed_rows(precision, results, failures, rooflines),
        )
        for precision in precisions
    ]
    if failures:
        reasons = [describe_measurement(f, labels[f.model, f.engine]) for f in failures]
        tables.append(ResultTable(heading="Not measured", remarks=reasons))
    if stages:
        tables += _stage_tables(stages)
    return Record(
        subject="infer",
        title=f"Inference in {', '.join(precisions)} at {bucket} pixels",
        results=results,
        tables=tables,
        plots=_plots(
            results,
            labels,
            stages,
            _SPEED_GOALS if _has_goals(results, machine) else (),
        ),
        goals=goals,
        notes=_notes(results, rooflines, stages),
        on_gpu=any(r.device == "cuda" for r in results),
        details={"failures": failures, "floors": rooflines, "stages": stages},
        machine=machine,
    )


def describe_measurement(measurement: Measurement, label: str | None = None) -> str:
    """Describe a measurement in one line, as in `torch in fp16 at batch 8: 600.0 images/s, ...`.

    The line begins with `label`, or with the engine if it is None.
    """
    batch = "" if measurement.batch is None else f" at batch {measurement.batch}"
    if isinstance(measurement, InferFailure):
        text = measurement.reason
    elif isinstance(measurement, StageTimes):
        text = ", ".join(f"{stage} {ms:.3f} ms" for stage, ms in measurement.milliseconds.items())
    else:
        place = ", data on the host" if measurement.data == "host" else ""
        rate, p50 = measurement.images_per_second, measurement.latency.p50
        text = f"{rate:.1f} images/s, p50 {p50:.2f} ms{place}"
    return f"{label or measurement.engine} in {measurement.precision}{batch}: {text}"


def speed_rows(
    precision: Precision,
    results: Sequence[InferResult],
    failures: Sequence[InferFailure],
    rooflines: Sequence[MatmulRoofline],
) -> list[tuple[str, ...]]:
    """Return table rows for one precision, with one cell per column of `COLUMNS`.

    Rows of failures follow the rows of results.
    """
    own = [r for r in results if r.precision == precision]
    engines = list(dict.fromkeys((r.model, r.engine, r.data) for r in own))
    own.sort(key=lambda r: engines.index((r.model, r.engine, r.data)))
    labels = _engine_labels([*results, *failures])
    # If there are several weights files, compare only models with the same weights.
    several = len({r.model for r in own if r.engine in ("eager", "torchvision")}) > 1
    base = {
        (r.model if several else "", r.batch): r.images_per_second
        for r in own
        if r.engine == "torchvision"
    }
    bound = next((f.images_per_second for f in rooflines if f.precision == precision), None)

    def speedup(r: InferResult) -> str:
        reference = base.get((r.model if several else "", r.batch))
        return "" if reference is None else format_significant(r.images_per_second / reference)

    measured = [
        (
            labels[r.model, r.engine],
            r.device if r.data == "device" else "host",
            str(r.batch),
            f"{r.images_per_second:.1f}",
            *map(format_significant, (r.latency.p50, r.latency.p90, r.latency.p99)),
            f"{r.peak_memory_mib:.0f}{'*' if r.memory == 'driver' else ''}",
            f"{r.detections_per_image:.1f}",
            speedup(r),
            "" if bound is None else f"{r.images_per_second / bound:.1%}",
        )
        for r in own
    ]
    failed = [
        (labels[f.model, f.engine], "", str(f.batch or "all"), "failed", *[""] * (len(COLUMNS) - 4))
        for f in failures
        if f.precision == precision
    ]
    return measured + failed


def _engine_labels(
    measurements: Sequence[InferResult | InferFailure],
) -> dict[tuple[str, str], str]:
    """Return labels by model and engine: the engine, and the model if it ran several models."""
    models = defaultdict(set)
    for m in measurements:
        models[m.engine].add(m.model)
    return {
        (model, engine): engine if len(own) == 1 else f"{engine}, {model}"
        for engine, own in models.items()
        for model in own
    }


def infer_goals(results: Sequence[InferResult], machine: MachineInfo) -> list[str]:
    """Return sentences that compare speed and memory use in fp16 with this project's goals.

    Only the torch backend on an H100 or H200 with the input size `_GOAL_BUCKET` has goals. For
    other GPUs or input sizes, return [].
    """
    if not _has_goals(results, machine):
        return []
    own = {
        r.batch: r
        for r in results
        if (r.engine, r.data, r.device, r.precision) == ("torch", "device", "cuda", "fp16")
    }
    goals = []
    if 8 in own:
        speed, memory = own[8].images_per_second, own[8].peak_memory_mib * 2**20 / 1e9
        minimum, target = (f"{g} is {format_verdict(speed >= g)}" for g in _SPEED_GOALS)
        goals += [
            f"Batch 8 in fp16 reaches {format_significant(speed)} images/s: the minimum of "
            f"{minimum}, the target of {target}.",
            f"Batch 8 in fp16 takes {format_significant(memory)} GB: the limit of {_MEMORY_GOAL} "
            f"GB is {format_verdict(memory < _MEMORY_GOAL)}.",
        ]
    if 1 in own:
        latency = own[1].latency.p50
        limit, target = (f"{g} ms is {format_verdict(latency < g)}" for g in _LATENCY_GOALS)
        goals.append(
            f"Batch 1 in fp16 takes {format_significant(latency)} ms: the limit of {limit}, the "
            f"target of {target}."
        )
    return goals


def _has_goals(results: Sequence[InferResult], machine: MachineInfo) -> bool:
    gpus = machine.gpus
    return bool(gpus and _GOAL_GPUS.search(gpus[0])) and results[0].bucket == _GOAL_BUCKET


def _stage_tables(stages: Sequence[StageTimes]) -> list[ResultTable]:
    """Return the tables of GPU time by stage and by kernel. The terminal does not show them."""
    names = (*STAGES, IDLE)
    shown = next((times for times in stages if times.batch == 8), stages[-1])
    return [
        ResultTable(
            heading="Time by stage, in ms",
            columns=("batch", *names),
            rows=[(str(t.batch), *(f"{t.milliseconds[n]:.3f}" for n in names)) for t in stages],
            on_terminal=False,
        ),
        ResultTable(
            heading=f"Costliest kernels of a batch of {shown.batch}",
            columns=("kernel", "calls", "ms"),
            rows=[(f"`{k.name}`", str(k.count), f"{k.milliseconds:.3f}") for k in shown.costliest],
            on_terminal=False,
        ),
    ]


def _notes(
    results: Sequence[InferResult],
    rooflines: Sequence[MatmulRoofline],
    stages: Sequence[StageTimes],
) -> list[str | dict[str, str]]:
    with_torchvision = any(r.engine == "torchvision" for r in results)
    meanings = dict(_COLUMN_MEANINGS)
    if with_torchvision:
        meanings |= _TORCHVISION_MEANINGS
    if rooflines:
        meanings |= _ROOFLINE_MEANINGS
    notes: list[str | dict[str, str]] = [_METHOD_NOTE, _COLUMNS_NOTE, meanings]
    if rooflines:
        rates = ", ".join(
            f"{f.precision} {format_significant(f.teraflops_per_second)} TFLOP/s" for f in rooflines
        )
        notes.append(_ROOFLINE_NOTE.format(flops=rooflines[0].flops_per_image / 1e12, rates=rates))
    if with_torchvision:
        notes.append(_TORCHVISION_NOTE)
    if stages:
        engine, precision = stages[0].engine, stages[0].precision
        notes += [_STAGES_NOTE.format(engine=engine, precision=precision), _STAGE_MEANINGS]
    return notes


def _plots(
    results: Sequence[InferResult],
    labels: Mapping[tuple[str, str], str],
    stages: Sequence[StageTimes],
    goals: Sequence[int],
) -> PlotGrid:
    """Return the plots of throughput and of GPU time by stage.

    Args:
        results: Measurements, at least one.
        labels: Labels of the curves, from `_engine_labels`.
        stages: GPU times by model stage. Empty: the plot of the stages is left out.
        goals: Goals of the throughput in images/s, drawn as lines.
    """
    plots: list[Callable[[Axes], None]] = [
        partial(_plot_throughput, results=results, labels=labels, goals=goals)
    ]
    if stages:
        plots.append(partial(_plot_stages, stages=stages))
    return PlotGrid(
        alt="Throughput over batch size", plots=plots, columns=len(plots), size=(8, 6.5)
    )


def _plot_throughput(
    axes: "Axes",
    results: Sequence[InferResult],
    labels: Mapping[tuple[str, str], str],
    goals: Sequence[int],
) -> None:
    """Plot throughput over batch size: a colour per precision, a line style per engine."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    curves: dict[tuple[str, Precision], list[InferResult]] = defaultdict(list)
    for r in results:
        label = labels[r.model, r.engine]
        curves[label if r.data == "device" else f"{label}, host", r.precision].append(r)
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
    bars = {
        str(times.batch): {name: ms / times.batch for name, ms in times.milliseconds.items()}
        for times in stages
    }
    plot_stacked_bars(axes, bars, {IDLE: "lightgrey"})
    axes.set(xlabel="images per batch", ylabel="ms per image")
    axes.set_title(f"Time by stage, {stages[0].engine} in {stages[0].precision}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6)

"""Results as a table for people and as JSON for programs."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..model.manifest import Precision
from .bulk import BulkResult
from .infer import Answer, InferFailure, InferResult
from .kernels import Goal, KernelResult, PeerResult
from .latency import Latency
from .machine import Machine, describe_machine
from .serve_results import ServeResult
from .stages import StageTimes
from .train import TrainResult

if TYPE_CHECKING:
    from .matmul_floor import MatmulFloor

_PERCENTILES = ("p50", "p90", "p99")
_NAMES = ("engine", "data", "precision", "model", "kernel", "size", "peers", "goal")

Results = (
    Sequence[InferResult]
    | Sequence[BulkResult]
    | Sequence[ServeResult]
    | Sequence[TrainResult]
    | Sequence[KernelResult]
)


def _command_line() -> str:
    return shlex.join(["maskrcnn", *sys.argv[1:]])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Report:
    """Results and what it takes to repeat them."""

    results: Results
    command: str = field(default_factory=_command_line)
    measured_at: str = field(default_factory=_now)
    machine: Machine = field(default_factory=describe_machine)


@dataclass(frozen=True)
class InferReport(Report):
    """Inference speed, and what it is held against."""

    results: Sequence[InferResult]
    failures: Sequence[InferFailure] = ()
    floors: Sequence["MatmulFloor"] = ()
    """Of the precisions, where a GPU computed."""
    stages: Sequence[StageTimes] = ()


def show(report: Report, table: RenderableType, json_path: Path | None) -> None:
    """Print the table, and write the report if it is wanted, making the folders it needs."""
    Console().print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(asdict(report), indent=2) + "\n")


_LOAD_COLUMNS = ("engine", "data", "batch", "images/s")
INFER_COLUMNS = (*_LOAD_COLUMNS, *_PERCENTILES, "MiB", "found", "times", "floor")


def infer_rows(
    precision: Precision,
    results: Sequence[InferResult],
    failures: Sequence[InferFailure] = (),
    floors: Sequence["MatmulFloor"] = (),
) -> list[tuple[str, ...]]:
    """Cells of the columns `INFER_COLUMNS`, a row an engine and batch size of one precision."""
    own = [r for r in results if r.precision == precision]
    ways = list(dict.fromkeys((r.model, r.engine, r.data) for r in own))
    own.sort(key=lambda r: ways.index((r.model, r.engine, r.data)))
    peers = {r.batch: r.images_per_second for r in own if r.engine == "torchvision"}
    floor = next((f.images_per_second for f in floors if f.precision == precision), None)
    measured = [
        (
            r.engine,
            r.device if r.data == "device" else "host",
            str(r.batch),
            f"{r.images_per_second:.1f}",
            *(in_figures(value) for value in (r.latency.p50, r.latency.p90, r.latency.p99)),
            f"{r.peak_memory_mib:.0f}{'*' if r.memory == 'driver' else ''}",
            f"{r.detections_per_image:.1f}",
            in_figures(r.images_per_second / peers[r.batch]) if r.batch in peers else "",
            "" if floor is None else f"{r.images_per_second / floor:.1%}",
        )
        for r in own
    ]
    blank = ("",) * (len(INFER_COLUMNS) - len(_LOAD_COLUMNS))
    return measured + [
        (f.engine, "", str(f.batch or "all"), "failed", *blank)
        for f in failures
        if f.precision == precision
    ]


def infer_table(
    results: Sequence[InferResult],
    failures: Sequence[InferFailure] = (),
    floors: Sequence["MatmulFloor"] = (),
) -> Group:
    """One table a precision, and why what failed did; all results are of one input size."""
    tables = []
    for precision in asked_precisions(results, failures):
        rows = infer_rows(precision, results, failures, floors)
        kept = [i for i in range(len(INFER_COLUMNS)) if any(row[i] for row in rows)]
        title = f"Inference in {precision} at {results[0].bucket} pixels; latencies in ms"
        table = _table(title, *(INFER_COLUMNS[i] for i in kept))
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        tables.append(table)
    return Group(*tables, *map(Text, failure_sentences(failures)))


def asked_precisions(
    results: Sequence[InferResult], failures: Sequence[InferFailure]
) -> list[Precision]:
    """Those in which something was to be measured."""
    found = [*(r.precision for r in results), *(f.precision for f in failures)]
    return list(dict.fromkeys(found))


def failure_sentences(failures: Sequence[InferFailure]) -> list[str]:
    """What could not be measured, and why."""
    return [answer_sentence(failure) for failure in failures]


def answer_sentence(answer: Answer) -> str:
    """One measurement in a line, as in `torch in fp16 at batch 8: 600.0 images/s`."""
    where = "" if answer.batch is None else f" at batch {answer.batch}"
    if isinstance(answer, InferFailure):
        said = answer.reason
    elif isinstance(answer, StageTimes):
        said = ", ".join(f"{stage} {ms:.3f} ms" for stage, ms in answer.milliseconds.items())
    else:
        place = ", from the host" if answer.data == "host" else ""
        said = f"{answer.images_per_second:.1f} images/s, p50 {answer.latency.p50:.2f} ms{place}"
    return f"{answer.engine} in {answer.precision}{where}: {said}"


TRAIN_COLUMNS = ("precision", "model", "images/s", *_PERCENTILES, "data", "MiB", "loss")


def train_rows(results: Sequence[TrainResult]) -> list[tuple[str, ...]]:
    """Cells of the columns `TRAIN_COLUMNS`, a row a run."""
    return [
        (
            r.precision,
            r.engine,
            f"{r.images_per_second:.1f}",
            *_percentiles(r.latency),
            f"{r.data_share:.0%}",
            f"{r.peak_memory_mib:.0f}",
            f"{r.final_loss:.3f}",
        )
        for r in results
    ]


def train_table(results: Sequence[TrainResult]) -> Table:
    """One row a precision and model; all runs have the same length, batch and device."""
    first = results[0]
    title = f"Training, {first.batch} images a step, on {first.device}; latencies of a step in ms"
    table = _table(title, *TRAIN_COLUMNS)
    for row in train_rows(results):
        table.add_row(*row)
    return table


KERNEL_COLUMNS = ("kernel", "size", "ms", "GB/s", "of copying", "peers", "times", "goal")


def kernel_rows(results: Sequence[KernelResult]) -> list[tuple[str, ...]]:
    """Cells of the columns `KERNEL_COLUMNS`, a row a case."""
    return [
        (
            r.kernel,
            r.size,
            in_figures(r.milliseconds),
            in_figures(r.gigabytes_per_second),
            f"{r.bandwidth_share:.1%}",
            ", ".join(_peer_cell(peer) for peer in r.peers),
            ", ".join(in_figures(r.times(peer)) for peer in r.peers),
            "" if r.goal is None else f"{goal_text(r.goal)}: {'met' if r.meets_goal else 'missed'}",
        )
        for r in results
    ]


def kernel_table(results: Sequence[KernelResult]) -> Table:
    """One row a kernel and size; all were measured on the same GPU."""
    table = _table("CUDA kernels; times in ms, * on the host", *KERNEL_COLUMNS)
    for row in kernel_rows(results):
        table.add_row(*row)
    return table


def goal_text(goal: Goal) -> str:
    """What is to be reached, such as `< 0.6 ms, >= 5 times`."""
    text = f"< {goal.milliseconds:g} ms"
    return text if goal.times_peer is None else f"{text}, >= {goal.times_peer:g} times"


def in_figures(value: float) -> str:
    """A positive number with three significant figures, and no exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _peer_cell(peer: PeerResult) -> str:
    return f"{peer.name} {in_figures(peer.milliseconds)}{'*' if peer.on_host else ''}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="left" if name in _NAMES else "right")
    return table


def _percentiles(latency: Latency) -> tuple[str, ...]:
    """Cells of the columns `_PERCENTILES`."""
    return tuple(f"{value:.1f}" for value in (latency.p50, latency.p90, latency.p99))

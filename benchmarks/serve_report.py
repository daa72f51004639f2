"""Results of serving as tables and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .bulk import BulkResult
from .report import Report
from .serve_load import ClosedLoop, Load
from .serve_results import ServeResult

_LATENCIES = ("p50", "p90", "p95", "p99", "max")
SPEED_COLUMNS = ("load", "max batch", "images/s", *_LATENCIES, "refused")
TIMES = ("decode", "queue", "infer", "encode", "rest")
TIME_COLUMNS = ("load", "max batch", "batch", *TIMES, "outside")
USE_COLUMNS = ("load", "max batch", "batches", "cores", "MiB", "client cores", "client lag")


@dataclass(frozen=True)
class ServeReport(Report):
    """Serving speed, and what it is held against."""

    results: Sequence[ServeResult]
    max_delay_ms: float | None = None
    """The server's, where it was started for the measurement."""
    bulk: BulkResult | None = None
    """The same bundle without a server, at the server's largest batch."""

    @property
    def own_results(self) -> list[ServeResult]:
        """Those of the server as it was asked for, which is measured first."""
        return [r for r in self.results if r.max_batch == self.results[0].max_batch]


def fastest(results: Sequence[ServeResult], *, streamed: bool = False) -> ServeResult | None:
    """The closed loop with the highest rate, over streams or not; none, there is none."""
    closed = closed_loops(results, streamed=streamed)
    return max(closed, key=lambda r: r.images_per_second, default=None)


def closed_loops(results: Sequence[ServeResult], *, streamed: bool) -> list[ServeResult]:
    """Those over streams, or the others."""
    loads = ((r, r.load) for r in results)
    return [r for r, load in loads if isinstance(load, ClosedLoop) and load.streamed == streamed]


def memory_mib(result: ServeResult) -> tuple[float, float] | None:
    """What the server held in the first and in the last fifth of the time; none, not known."""
    if result.server is None:
        return None
    memory = result.server.memory_mib
    fifth = max(1, len(memory) // 5)
    return median(memory[:fifth]), median(memory[-fifth:])


def load_name(load: Load, best: ServeResult | None = None) -> str:
    """A load in words, as `16 clients` or, compared with the best result, `poisson 27/s (90%)`."""
    if isinstance(load, ClosedLoop):
        clients = f"{load.clients} client{'' if load.clients == 1 else 's'}"
        return f"{clients} streamed" if load.streamed else clients
    share = "" if best is None else f" ({load.rate / best.images_per_second:.0%})"
    return f"{load.arrivals} {load.rate:.1f}/s{share}"


def speed_rows(results: Sequence[ServeResult]) -> list[tuple[str, ...]]:
    """Cells of the columns `SPEED_COLUMNS`, a row a load."""
    return [
        (
            *names,
            f"{r.images_per_second:.1f}",
            *(_milliseconds(getattr(r.latency, name)) for name in _LATENCIES),
            str(refused_requests(r)),
        )
        for names, r in _named(results)
    ]


def time_rows(results: Sequence[ServeResult]) -> list[tuple[str, ...]]:
    """Cells of the columns `TIME_COLUMNS`, a row a load."""
    return [
        (
            *names,
            f"{r.mean_batch_size:.1f}",
            *(_milliseconds(getattr(r.times, name)) for name in TIMES),
            f"{outside_share(r):.1%}",
        )
        for names, r in _named(results)
    ]


def use_rows(results: Sequence[ServeResult]) -> list[tuple[str, ...]]:
    """Cells of the columns `USE_COLUMNS`, a row a load."""
    rows: list[tuple[str, ...]] = []
    for names, r in _named(results):
        cores = "" if r.server is None else f"{r.server.cores:.2f}"
        memory = memory_mib(r)
        held = "" if memory is None else f"{memory[0]:.0f} to {memory[1]:.0f}"
        client = (f"{r.client.cores:.2f}", _milliseconds(r.client.lag))
        rows.append((*names, f"{r.batches_at_once:.2f}", cores, held, *client))
    return rows


def refused_requests(result: ServeResult) -> int:
    """Requests that ended without detections."""
    return sum(refusals.requests for refusals in result.refusals)


def refusal_sentences(results: Sequence[ServeResult]) -> list[str]:
    """How many requests ended without detections, how and how fast."""
    return [
        f"{load_name(r.load)}: {f.requests} of {r.requests + refused_requests(r)} requests ended "
        f"with {f.status}, p50 {_milliseconds(f.latency.p50)} ms, "
        f"p99 {_milliseconds(f.latency.p99)} ms"
        for r in results
        for f in r.refusals
    ]


def outside_share(result: ServeResult) -> float:
    """Share of the mean latency that a request neither waits for the model nor is in it."""
    times = result.times
    return (times.decode + times.encode + times.rest) / result.latency.mean


def serve_table(results: Sequence[ServeResult]) -> Group:
    """Speed, where the time goes, and what server and clients take; times in ms."""
    return Group(
        _table("Serving; latencies in ms", SPEED_COLUMNS, speed_rows(results)),
        *map(Text, refusal_sentences(results)),
        _table("Where a request's time goes, means in ms", TIME_COLUMNS, time_rows(results)),
        _table("What the server and the clients take", USE_COLUMNS, use_rows(results)),
    )


def result_sentence(result: ServeResult) -> str:
    """One measurement in a line, as in `4 clients: 30.5 images/s, p50 126 ms, p99 198 ms`."""
    latency = result.latency
    refused = refused_requests(result)
    return (
        f"{load_name(result.load)}: {result.images_per_second:.1f} images/s, "
        f"p50 {_milliseconds(latency.p50)} ms, p99 {_milliseconds(latency.p99)} ms"
        + (f", {refused} refused" if refused else "")
    )


def _named(results: Sequence[ServeResult]) -> list[tuple[tuple[str, str], ServeResult]]:
    """Each with the first two cells of its row."""
    best = {
        r.max_batch: fastest([o for o in results if o.max_batch == r.max_batch]) for r in results
    }
    return [((load_name(r.load, best[r.max_batch]), str(r.max_batch)), r) for r in results]


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the column of the largest batch where it is the same in all rows."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    uniform = len({row[1] for row in rows}) == 1
    kept = [i for i in range(len(columns)) if not (uniform and i == 1)]
    for i in kept:
        table.add_column(columns[i], justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    return table

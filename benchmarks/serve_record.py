"""The record of a serving benchmark: a page, pictures of it, and all numbers as JSON."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from .bulk import BulkResult
from .record import begin_record, markdown_table, record_page
from .serve_load import ClosedLoop, OpenLoop
from .serve_report import (
    SPEED_COLUMNS,
    TIME_COLUMNS,
    TIMES,
    USE_COLUMNS,
    ServeReport,
    closed_loops,
    fastest,
    load_name,
    memory_mib,
    refusal_sentences,
    refused_requests,
    speed_rows,
    time_rows,
    use_rows,
)
from .serve_results import ServeResult

mpl.use("Agg")
from matplotlib import pyplot as plt

_GOAL = 0.7
"""Share of the engine's own rate."""
_PERCENTILES = ("p50", "p90", "p95", "p99")

_COUNTED = """\
Images are {images}. Clients are a closed loop: each sends its next image when it has the answer to
the last, in a call for each or, "streamed", over one stream for all clients of a process. Other
loads are open: images come at a rate, in poisson loads at random, whatever becomes of those before,
and the latency of each counts from the moment at which it was to be sent; in brackets is the rate
as a share of the highest that clients reached without streams. "images/s" are those whose
detections came within the time. Latencies are of answers with detections; "refused" are the others.
"""
_TIME = """\
Means over the requests. Decode, queue, infer and encode are stages of the server, as it reports
them: a request is in "queue" while a batch fills and the model is busy with others, and in "infer"
as long as its whole batch. "rest" is what lies around them: network, gRPC, the event loop, and the
client. "outside" is the share of the latency in which a request neither waits for the model nor is
in it. "batch" is the size of the batch that a request was in.
"""
_USE = """\
"batches" are those that the backend had at a time, mean over time. "cores" is the CPU time of the
server and its children by time, "MiB" their resident memory in the first and the last fifth of the
time. "client cores" is the CPU time of the busiest client process, and "client lag" the 99th
percentile of the time by which requests were sent too late.
"""


def write_record(report: ServeReport, images: str, folder: Path) -> Path:
    """Write `serve-<gpu>-<yyyymm>.md`, and `.png` and `.json` beside it.

    Args:
        report: what was measured, where, when and how; at least one result.
        images: what the images were, in words.
        folder: made if it does not exist.

    Returns:
        The page.
    """
    page = begin_record("serve", report, folder)
    picture = page.with_suffix(".png")
    plot_serving(report, picture)
    page.write_text(_page(report, images, picture.name))
    return page


def plot_serving(report: ServeReport, picture: Path) -> None:
    """Draw throughput, latency and where the time goes, closed loops apart from open ones."""
    own = report.own_results
    closed, streamed = (closed_loops(own, streamed=streamed) for streamed in (False, True))
    opened = [r for r in own if isinstance(r.load, OpenLoop)]
    rows = 2 if closed or streamed else 1
    figure, axes = plt.subplots(rows, 2, figsize=(12, 4.5 * rows), layout="constrained")
    places = iter(axes.flat)
    if closed or streamed:
        _plot_throughput(next(places), report)
    if closed:
        _plot_latency(next(places), closed)
    if opened:
        _plot_latency(next(places), opened)
    _plot_times(next(places), own)
    for place in places:
        place.remove()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def goal_sentences(report: ServeReport) -> list[str]:
    """What was reached of what was wanted, as far as it was measured."""
    own = report.own_results
    unbatched = [r for r in report.results if r not in own]
    best = fastest(own)
    sentences = []
    if report.bulk is not None:
        both = (best, fastest(own, streamed=True))
        sentences += [_engine_sentence(r, report.bulk) for r in both if r is not None]
    if best is None:
        return sentences
    if (alone := fastest(unbatched)) is not None:
        sentences.append(
            f"Batches of up to {best.max_batch} give {best.images_per_second:.1f} images/s, "
            f"batches of one {alone.images_per_second:.1f}: "
            f"{best.images_per_second / alone.images_per_second:.2f} times as many."
        )
    return sentences + [
        _load_sentence(result, result.load, best, report.max_delay_ms)
        for result in own
        if isinstance(result.load, OpenLoop)
    ]


def _engine_sentence(best: ServeResult, bulk: BulkResult) -> str:
    engine_rate = bulk.engine_images_per_second
    share = best.images_per_second / engine_rate
    verdict = ""
    if bulk.device == "cuda":
        verdict = f"; the bar of {_GOAL:.0%} is {_verdict(share >= _GOAL)}"
    return (
        f"{load_name(best.load)}: {best.images_per_second:.1f} images/s are {share:.0%} of the "
        f"engine's own {engine_rate:.1f}, and "
        f"{best.images_per_second / bulk.images_per_second:.0%} of the "
        f"{bulk.images_per_second:.1f} that go without a server{verdict}."
    )


def _load_sentence(
    result: ServeResult, load: OpenLoop, best: ServeResult, max_delay_ms: float | None
) -> str:
    """What an open loop did to latency, refusals and memory."""
    refused = refused_requests(result)
    slowest = max((refusals.latency.p99 for refusals in result.refusals), default=0.0)
    said = [
        f"{load_name(load, best)}: {refused} of {refused + result.requests} "
        f"refused{f' with a p99 of {slowest:.1f} ms' if refused else ''}",
        f"p99 of the others {result.latency.p99:.1f} ms",
    ]
    if max_delay_ms is not None and load.rate < best.images_per_second:
        bar = max_delay_ms + 3 * best.times.infer
        said.append(f"the bar of {bar:.1f} ms is {_verdict(result.latency.p99 <= bar)}")
    if (memory := memory_mib(result)) is not None:
        said.append(f"memory from {memory[0]:.0f} to {memory[1]:.0f} MiB")
    return "; ".join(said) + "."


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def _plot_throughput(axes: Axes, report: ServeReport) -> None:
    for size in dict.fromkeys(r.max_batch for r in report.results):
        alike = [r for r in report.results if r.max_batch == size]
        for streamed in (False, True):
            if curve := closed_loops(alike, streamed=streamed):
                rates = [r.images_per_second for r in curve]
                label = f"batches up to {size}{', over streams' if streamed else ''}"
                axes.plot(_ticks(curve), rates, "o-", label=label)
    if (bulk := report.bulk) is not None:
        axes.axhline(bulk.engine_images_per_second, color="black", label="the engine, alone")
    axes.set(xlabel="clients", ylabel="images a second", title="Throughput", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)


def _plot_latency(axes: Axes, results: Sequence[ServeResult]) -> None:
    closed = isinstance(results[0].load, ClosedLoop)
    loads = _ticks(results)
    for name in _PERCENTILES:
        axes.plot(loads, [getattr(r.latency, name) for r in results], "o-", label=name)
    if any(r.refusals for r in results):
        slowest = [max((f.latency.p99 for f in r.refusals), default=math.nan) for r in results]
        axes.plot(loads, slowest, "kx", label="p99 of refusals")
    axes.set_yscale("log")
    axes.set(xlabel="clients" if closed else "images a second, offered", ylabel="ms")
    axes.set_title("Latency of clients" if closed else "Latency at a given rate")
    axes.legend()
    axes.grid(alpha=0.3, which="both")


def _plot_times(axes: Axes, results: Sequence[ServeResult]) -> None:
    labels = [load_name(r.load) for r in results]
    ends = [0.0] * len(results)
    for name in TIMES:
        shares = [getattr(r.times, name) / r.latency.mean for r in results]
        axes.barh(labels, shares, left=ends, height=0.6, label=name)
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    axes.invert_yaxis()  # the first on top
    axes.set(xlabel="share of the mean latency", title="Where a request's time goes", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5)


def _ticks(results: Sequence[ServeResult]) -> list[str]:
    """Clients, or images a second."""
    loads = [r.load for r in results]
    return [f"{o.rate:.1f}" if isinstance(o, OpenLoop) else f"{o.clients}" for o in loads]


def _page(report: ServeReport, images: str, picture: str) -> str:
    results = report.results
    bulk = report.bulk
    on_gpu = bulk.device == "cuda" if bulk else bool(report.machine.gpus)
    engine = f", {bulk.engine} in {bulk.precision}" if bulk else ""
    refused = refusal_sentences(results)
    return record_page(
        f"Serving over gRPC{engine}",
        report,
        on_gpu=on_gpu,
        goals=goal_sentences(report),
        body=[
            "\n## Speed, latencies in ms\n",
            markdown_table(SPEED_COLUMNS, speed_rows(results)),
            *(["", *(f"- {sentence}" for sentence in refused)] if refused else []),
            "\n## Where a request's time goes, in ms\n",
            markdown_table(TIME_COLUMNS, time_rows(results)),
            "\n## What the server and the clients take\n",
            markdown_table(USE_COLUMNS, use_rows(results)),
            f"\n![Throughput, latency and where the time goes]({picture})",
        ],
        counted=[_COUNTED.format(images=images), _TIME, _USE],
    )

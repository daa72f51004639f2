"""Tables, plots, goals and notes of the serving benchmark, as a `Record`."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..bulk.measure import BulkResult
from ..common.machine import MachineInfo, describe_machine
from ..common.record import PlotGrid, Record, format_verdict
from .load import ClosedLoop, HttpLoop, OpenLoop
from .results import STAGES, ServeResult, closed_loops, fastest, load_name, own_results
from .tables import format_ms, serve_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Goal on a GPU: minimum throughput as a fraction of the throughput of the model step alone.
_GOAL = 0.7
# Goal: minimum throughput over HTTP as a fraction of the throughput over gRPC.
_HTTP_GOAL = 0.8

_LOAD_NOTE = """\
Images are {images}. Loads named "clients" are closed loops: each client sends its next image when
the previous one is answered. In "streamed" loads, all clients of a process share one gRPC stream.
In loads "over HTTP", each client has its own connection. In all other loads of clients, the calls
are unary gRPC calls. Loads without "clients" are open loops: images are sent at a given average
rate, at random times if the load is named "poisson", otherwise at equal intervals. A percentage in
the name of a load is its rate relative to the highest throughput of clients with unary calls.
"""
_SPEED_NOTE = "The table of speed has these columns:"
_SPEED_MEANINGS = {
    "images/s": "images whose detections arrived within the measurement, per second",
    "p50 to p99, max": "latency of requests that were answered with detections; in open loops, it "
    "counts from the time at which an image was due to be sent",
    "failed": "number of requests that ended without detections",
}
_TIMES_NOTE = """\
The table of times by stage has means over the answered requests. The server reports the times of
"decode", "queue", "infer" and "encode" in its responses. The columns are:
"""
_TIMES_MEANINGS = {
    "batch": "mean size of the batch that contained a request",
    "decode": "decoding, resizing and padding of the image",
    "queue": "wait for a CPU thread, for the batch to fill and for the model to be free",
    "infer": "computation of the request's batch by the model",
    "encode": "scaling of the boxes and encoding of the masks",
    "rest": "remaining latency: network, gRPC, the server's event loop, and the client",
    "outside": 'fraction of the latency outside "queue" and "infer"',
}
_USE_NOTE = "The table of CPU and memory use has these columns:"
_USE_MEANINGS = {
    "batches": "mean number of batches that the backend computes at the same time",
    "cores": "CPU time of the server and its child processes divided by the wall-clock time",
    "server, front ends, workers, clients": "CPU milliseconds per image of the server process, of "
    "its front-end processes, of its worker processes and of all client processes",
    "MiB": "median resident memory of the server and its child processes, in the first and in the "
    "last fifth of the measurement",
    "client cores": "CPU time of the busiest client process divided by the wall-clock time",
    "client lag": "99th percentile of the delay, in ms, with which clients sent their requests",
}
_THREADS_NOTE = """\
In the table of CPU time by thread, the thread "main" of the server process runs the server's event
loop. A thread that does not set its name has the name of its program, such as "python".
"""


def serve_record(
    results: Sequence[ServeResult],
    images: str,
    max_delay_ms: float | None = None,
    bulk: BulkResult | None = None,
    machine: MachineInfo | None = None,
) -> Record:
    """Return a record of one run of the serving benchmark.

    Args:
        results: Results, at least one. Results of the server under test come first, then results
            of a server with another maximum batch size, if any.
        images: Description of the images.
        max_delay_ms: `--max-delay-ms` of the server. None: it is unknown.
        bulk: Result of bulk prediction with the same bundle, without a server, at the server's
            maximum batch size. None: it was not measured.
        machine: machine of the measurement. None: describe this machine.
    """
    machine = machine or describe_machine()
    over_http = " and HTTP" if any(isinstance(r.load, HttpLoop) for r in results) else ""
    engine = f", {bulk.engine} in {bulk.precision}" if bulk else ""
    return Record(
        subject="serve",
        title=f"Serving over gRPC{over_http}{engine}",
        results=results,
        tables=serve_tables(results),
        plots=serve_plots(results, bulk),
        goals=serve_goals(results, max_delay_ms, bulk),
        notes=[
            _LOAD_NOTE.format(images=images),
            _SPEED_NOTE,
            _SPEED_MEANINGS,
            _TIMES_NOTE,
            _TIMES_MEANINGS,
            _USE_NOTE,
            _USE_MEANINGS,
            _THREADS_NOTE,
        ],
        on_gpu=bulk.device == "cuda" if bulk else bool(machine.gpus),
        details={"max_delay_ms": max_delay_ms, "bulk": bulk},
        machine=machine,
    )


def describe_result(result: ServeResult) -> str:
    """Describe a result in one line, as in `4 clients: 30.5 images/s, p50 126 ms, p99 198 ms`."""
    failed = result.failed_requests
    return (
        f"{load_name(result.load)}: {result.images_per_second:.1f} images/s, "
        f"p50 {format_ms(result.latency.p50)} ms, p99 {format_ms(result.latency.p99)} ms"
        + (f", {failed} failed" if failed else "")
    )


def serve_goals(
    results: Sequence[ServeResult], max_delay_ms: float | None, bulk: BulkResult | None
) -> list[str]:
    """Return sentences that compare results of the serving benchmark with this project's goals.

    If `max_delay_ms` is None, the latency goals are left out. If `bulk` is None, the throughput
    goals are left out.
    """
    own = own_results(results)
    best = fastest(own)
    goals = []
    if bulk is not None:
        goals += [_throughput_goal(r, bulk) for r in (best, fastest(own, streamed=True)) if r]
    if best is None:
        return goals
    goals += _http_goals(own)
    unbatched = fastest([r for r in results if r not in own])
    if unbatched is not None:
        goals.append(
            f"{load_name(best.load)}: with batches of up to {best.max_batch} images, the server "
            f"reaches {best.images_per_second:.1f} images/s. This is "
            f"{best.images_per_second / unbatched.images_per_second:.2f} times the "
            f"{unbatched.images_per_second:.1f} images/s with batches of one image."
        )
    return goals + [
        _latency_goal(result, result.load, best, max_delay_ms)
        for result in own
        if isinstance(result.load, OpenLoop)
    ]


def _http_goals(own: Sequence[ServeResult]) -> list[str]:
    """Return sentences that compare the throughput of HTTP with that of unary gRPC calls.

    There is one sentence per number of clients that was measured both over HTTP and over gRPC.
    """
    unary = closed_loops(own, streamed=False)
    rates = {r.load.clients: r.images_per_second for r in unary if isinstance(r.load, ClosedLoop)}
    goals = []
    for result in own:
        if isinstance(result.load, HttpLoop) and result.load.clients in rates:
            share = result.images_per_second / rates[result.load.clients]
            goals.append(
                f"{load_name(result.load)}: {result.images_per_second:.1f} images/s, {share:.0%} "
                f"of gRPC's; the goal of {_HTTP_GOAL:.0%} is {format_verdict(share >= _HTTP_GOAL)}."
            )
    return goals


def _throughput_goal(best: ServeResult, bulk: BulkResult) -> str:
    engine_rate = bulk.engine_images_per_second
    share = best.images_per_second / engine_rate
    verdict = ""
    if bulk.device == "cuda":
        verdict = f" The goal of at least {_GOAL:.0%} is {format_verdict(share >= _GOAL)}."
    return (
        f"{load_name(best.load)}: the server reaches {best.images_per_second:.1f} images/s. This "
        f"is {share:.0%} of the {engine_rate:.1f} images/s of the model alone, without a server."
        f"{verdict} The server also reaches "
        f"{best.images_per_second / bulk.images_per_second:.0%} of the "
        f"{bulk.images_per_second:.1f} images/s of bulk prediction (from JPEG files to masks "
        "without a server)."
    )


def _latency_goal(
    result: ServeResult, load: OpenLoop, best: ServeResult, max_delay_ms: float | None
) -> str:
    """Return sentences on latency, failed requests and server memory under an open loop.

    If the rate of `load` is below the throughput of `best`, and `max_delay_ms` is known, the
    sentences also compare the latency with a goal.

    Args:
        result: result under `load`.
        load: open loop under which the server was measured.
        best: fastest closed-loop result.
        max_delay_ms: the server's option `--max-delay-ms`, from which the goal is computed. None:
            it is unknown.
    """
    failed = result.failed_requests
    failure = f"{failed} of {failed + result.requests} requests failed"
    if failed:
        slowest = max(r.latency.p99 for r in result.failures)
        failure += f", 99% of these within {slowest:.1f} ms"
    times = "random times" if load.arrivals == "poisson" else "equal intervals"
    parts = [
        f"Load {load_name(load, best)}: {load.rate:.1f} images/s are sent at {times}",
        f"This rate is {load.rate / best.images_per_second:.0%} of the "
        f"{best.images_per_second:.1f} images/s with {load_name(best.load)}",
        failure,
        f"The p99 latency of answered requests is {result.latency.p99:.1f} ms",
    ]
    if max_delay_ms is not None and load.rate < best.images_per_second:
        limit = max_delay_ms + 3 * best.times.infer
        parts += [
            f"The goal for this latency is {limit:.1f} ms: the maximum batching delay of "
            f"{max_delay_ms:.1f} ms plus three times the mean inference time of a batch in "
            f"the load with {load_name(best.load)}",
            f"The goal is {format_verdict(result.latency.p99 <= limit)}",
        ]
    if (memory := result.server_memory_mib) is not None:
        parts.append(
            f"During this load, the server's memory went from {memory[0]:.0f} to "
            f"{memory[1]:.0f} MiB"
        )
    return ". ".join(parts) + "."


def serve_plots(results: Sequence[ServeResult], bulk: BulkResult | None) -> PlotGrid:
    """Return the plots of throughput, latency, and time of a request by stage.

    `bulk` is the result of bulk prediction without a server. If it is not None, a line shows the
    throughput of the model step alone.
    """
    own = own_results(results)
    closed, streamed = (closed_loops(own, streamed=streamed) for streamed in (False, True))
    opened = [r for r in own if isinstance(r.load, OpenLoop)]
    plots = []
    if closed or streamed:
        plots.append(partial(_plot_throughput, results=results, bulk=bulk))
    plots += [partial(_plot_latency, results=rows) for rows in (closed, opened) if rows]
    plots.append(partial(_plot_times, results=own))
    return PlotGrid(alt="Throughput, latency and stages", plots=plots, columns=2, size=(6, 4.5))


def _plot_throughput(axes: "Axes", results: Sequence[ServeResult], bulk: BulkResult | None) -> None:
    for size in dict.fromkeys(r.max_batch for r in results):
        same_size = [r for r in results if r.max_batch == size]
        for streamed in (False, True):
            if curve := closed_loops(same_size, streamed=streamed):
                rates = [r.images_per_second for r in curve]
                label = f"batches up to {size}{', over streams' if streamed else ''}"
                axes.plot(_ticks(curve), rates, "o-", label=label)
    if bulk is not None:
        axes.axhline(bulk.engine_images_per_second, color="black", label="the engine, alone")
    axes.set(xlabel="clients", ylabel="images per second", title="Throughput", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)


def _plot_latency(axes: "Axes", results: Sequence[ServeResult]) -> None:
    closed = isinstance(results[0].load, ClosedLoop)
    loads = _ticks(results)
    for name in ("p50", "p90", "p95", "p99"):
        axes.plot(loads, [getattr(r.latency, name) for r in results], "o-", label=name)
    if any(r.failures for r in results):
        slowest = [max((f.latency.p99 for f in r.failures), default=math.nan) for r in results]
        axes.plot(loads, slowest, "kx", label="p99 of failures")
    axes.set_yscale("log")
    axes.set(xlabel="clients" if closed else "images per second, offered", ylabel="ms")
    axes.set_title("Latency of clients" if closed else "Latency at a given rate")
    axes.legend()
    axes.grid(alpha=0.3, which="both")


def _plot_times(axes: "Axes", results: Sequence[ServeResult]) -> None:
    labels = [load_name(r.load) for r in results]
    ends = [0.0] * len(results)
    for name in STAGES:
        shares = [getattr(r.times, name) / r.latency.mean for r in results]
        axes.barh(labels, shares, left=ends, height=0.6, label=name)
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    axes.invert_yaxis()  # the first load on top
    axes.set(xlabel="fraction of the mean latency", title="Time of a request", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5)


def _ticks(results: Sequence[ServeResult]) -> list[str]:
    """Return one tick label per result: the load's number of clients or images per second."""
    loads = [r.load for r in results]
    return [f"{o.rate:.1f}" if isinstance(o, OpenLoop) else f"{o.clients}" for o in loads]

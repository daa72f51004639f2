"""Tables, goals and notes of the serving benchmark, as a `Record`."""

from collections.abc import Sequence
from statistics import median

from ..bulk.measure import BulkResult
from ..common.machine import MachineInfo, describe_machine
from ..common.record import Record, ResultTable, format_verdict
from .cpu_time import CPU_COLUMNS, cpu_cells, thread_table
from .load import ClosedLoop, HttpLoop, OpenLoop
from .plots import serve_plots
from .results import STAGES, ServeResult, closed_loops, fastest, load_name, own_results

# Goal on a GPU: minimum throughput as a fraction of the throughput of the model step alone.
_GOAL = 0.7
# Goal: minimum throughput over HTTP as a fraction of the throughput over gRPC.
_HTTP_GOAL = 0.8
_MAX_BATCH = "max batch"
_LATENCIES = ("p50", "p90", "p95", "p99", "max")

_LOAD_NOTE = """\
Images are {images}. Loads named "clients" are closed loops: each client sends its next image when
the previous one is answered. Clients send unary calls or, if "streamed", share one stream per
client process. All other loads are open loops, in which images are sent at a given average rate: at
random times if the load is named "poisson", otherwise at equal intervals. A percentage in the name
of a load is its rate relative to the highest throughput of unary clients.
"""
_SPEED_NOTE = "The table of speed has these columns:"
_SPEED_MEANINGS = {
    "images/s": "images whose detections arrived within the measurement, per second",
    "p50 to p99, max": "latency of requests that were answered with detections; in open loops, it "
    "counts from the time at which an image was due to be sent",
    "refused": "number of all other requests",
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
    "MiB": "resident memory of the server and its child processes in the first and in the last "
    "fifth of the measurement",
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
        tables=_tables(results),
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
    refused = _refused_requests(result)
    return (
        f"{load_name(result.load)}: {result.images_per_second:.1f} images/s, "
        f"p50 {_format_ms(result.latency.p50)} ms, p99 {_format_ms(result.latency.p99)} ms"
        + (f", {refused} refused" if refused else "")
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
            f"Batches of up to {best.max_batch} images give {best.images_per_second:.1f} images/s, "
            f"batches of one image {unbatched.images_per_second:.1f}: "
            f"{best.images_per_second / unbatched.images_per_second:.2f} times the throughput."
        )
    return goals + [
        _latency_goal(result, result.load, best, max_delay_ms)
        for result in own
        if isinstance(result.load, OpenLoop)
    ]


def _http_goals(own: Sequence[ServeResult]) -> list[str]:
    """Return sentences that compare the throughput of HTTP with that of unary gRPC calls.

    There is one sentence per number of clients that was measured with both.
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
        verdict = f"; the goal of {_GOAL:.0%} is {format_verdict(share >= _GOAL)}"
    return (
        f"{load_name(best.load)}: {best.images_per_second:.1f} images/s, {share:.0%} of the "
        f"engine's own {engine_rate:.1f} images/s (model step alone){verdict}. The throughput is "
        f"also {best.images_per_second / bulk.images_per_second:.0%} of the "
        f"{bulk.images_per_second:.1f} images/s of bulk prediction without a server."
    )


def _latency_goal(
    result: ServeResult, load: OpenLoop, best: ServeResult, max_delay_ms: float | None
) -> str:
    """Return sentences on latency, refused requests and server memory under an open loop.

    The latency goal depends on `best`, the fastest closed-loop result, and on the server's option
    `--max-delay-ms`. If `max_delay_ms` is None, the latency is not compared with a goal.
    """
    refused = _refused_requests(result)
    refusal = f"{refused} of {refused + result.requests} refused"
    if refused:
        slowest = max(r.latency.p99 for r in result.refusals)
        refusal += f", 99% of them within {slowest:.1f} ms"
    times = "random times" if load.arrivals == "poisson" else "equal intervals"
    parts = [
        f"Load {load_name(load, best)}: images are sent at {times}. 100% is the "
        f"{best.images_per_second:.1f} images/s of closed-loop clients. Requests: {refusal}",
        f"The p99 of answered requests is {result.latency.p99:.1f} ms",
    ]
    if max_delay_ms is not None and load.rate < best.images_per_second:
        limit = max_delay_ms + 3 * best.times.infer
        verdict = format_verdict(result.latency.p99 <= limit)
        goal = f"three batch times plus the maximum batching delay of {max_delay_ms:.1f} ms"
        parts.append(f"The goal for p99 is {goal}. This goal of {limit:.1f} ms is {verdict}")
    if (memory := _memory_mib(result)) is not None:
        parts.append(f"The server's memory went from {memory[0]:.0f} to {memory[1]:.0f} MiB")
    return ". ".join(parts) + "."


def _tables(results: Sequence[ServeResult]) -> list[ResultTable]:
    speed, times, use = [], [], []
    for r in results:
        best = fastest([other for other in results if other.max_batch == r.max_batch])
        name = (load_name(r.load, best), str(r.max_batch))
        latencies = (_format_ms(getattr(r.latency, key)) for key in _LATENCIES)
        speed.append((*name, f"{r.images_per_second:.1f}", *latencies, str(_refused_requests(r))))
        stages = (_format_ms(getattr(r.times, key)) for key in STAGES)
        outside = (r.times.decode + r.times.encode + r.times.rest) / r.latency.mean
        times.append((*name, f"{r.mean_batch_size:.1f}", *stages, f"{outside:.1%}"))
        memory = _memory_mib(r)
        resident = "" if memory is None else f"{memory[0]:.0f} to {memory[1]:.0f}"
        client = (f"{r.client.cores:.2f}", _format_ms(r.client.lag))
        use.append((*name, f"{r.batches_at_once:.2f}", *cpu_cells(r), resident, *client))
    columns = ("load", _MAX_BATCH)
    return [
        ResultTable(
            heading="Speed, latencies in ms",
            columns=(*columns, "images/s", *_LATENCIES, "refused"),
            rows=speed,
            remarks=_refusals(results),
            optional_column=_MAX_BATCH,
        ),
        ResultTable(
            heading="Time of a request by stage, means in ms",
            columns=(*columns, "batch", *STAGES, "outside"),
            rows=times,
            optional_column=_MAX_BATCH,
        ),
        ResultTable(
            heading="CPU and memory use of server and clients",
            columns=(*columns, "batches", *CPU_COLUMNS, "MiB", "client cores", "client lag"),
            rows=use,
            optional_column=_MAX_BATCH,
        ),
        thread_table(own_results(results)),
    ]


def _refusals(results: Sequence[ServeResult]) -> list[str]:
    return [
        f"{load_name(r.load)}: {f.requests} of {r.requests + _refused_requests(r)} requests ended "
        f"with {f.status}, half of them within {_format_ms(f.latency.p50)} ms, "
        f"99% within {_format_ms(f.latency.p99)} ms"
        for r in results
        for f in r.refusals
    ]


def _memory_mib(result: ServeResult) -> tuple[float, float] | None:
    """Return the server's median memory in MiB in the first and the last fifth of a measurement.

    None: the server's memory was not measured.
    """
    if result.server is None:
        return None
    memory = result.server.memory_mib
    fifth = max(1, len(memory) // 5)
    return median(memory[:fifth]), median(memory[-fifth:])


def _refused_requests(result: ServeResult) -> int:
    return sum(refusals.requests for refusals in result.refusals)


def _format_ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"

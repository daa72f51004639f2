"""Tables of the serving benchmark: speed, stages, failures, CPU and memory use."""

from collections.abc import Iterator, Sequence
from typing import Final

from ...serving.rpc.front_end_server import FRONT_END_NAME
from ..common.processes import ThreadUsage
from ..common.record import ResultTable
from .results import STAGES, ServeResult, fastest, load_name, own_results

CPU_COLUMNS: Final = ("cores", "server", "front ends", "workers", "clients")

# Minimum fraction of the server's CPU time. The table omits threads that use less.
_MIN_SHARE: Final = 0.005
_MAX_BATCH = "max batch"
_LATENCIES = ("p50", "p90", "p95", "p99", "max")


def serve_tables(results: Sequence[ServeResult]) -> list[ResultTable]:
    """Return the tables of speed, stages, CPU and memory use, and CPU time by thread."""
    speed, times, use = [], [], []
    for r in results:
        best = fastest([other for other in results if other.max_batch == r.max_batch])
        name = (load_name(r.load, best), str(r.max_batch))
        latencies = (format_ms(getattr(r.latency, key)) for key in _LATENCIES)
        speed.append((*name, f"{r.images_per_second:.1f}", *latencies, str(r.failed_requests)))
        stages = (format_ms(getattr(r.times, key)) for key in STAGES)
        outside = (r.times.decode + r.times.encode + r.times.rest) / r.latency.mean
        times.append((*name, f"{r.mean_batch_size:.1f}", *stages, f"{outside:.1%}"))
        memory = r.server_memory_mib
        resident = "" if memory is None else f"{memory[0]:.0f} to {memory[1]:.0f}"
        client = (f"{r.client.cores:.2f}", format_ms(r.client.lag))
        use.append((*name, f"{r.batches_at_once:.2f}", *cpu_cells(r), resident, *client))
    columns = ("load", _MAX_BATCH)
    return [
        ResultTable(
            heading="Speed, latencies in ms",
            columns=(*columns, "images/s", *_LATENCIES, "failed"),
            rows=speed,
            remarks=_failures(results),
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


def _failures(results: Sequence[ServeResult]) -> list[str]:
    return [
        f"Load {load_name(r.load)}: {f.requests} of {r.requests + r.failed_requests} requests "
        f"ended with the status {f.status}. Half of the requests with this status ended within "
        f"{format_ms(f.latency.p50)} ms, and 99% within {format_ms(f.latency.p99)} ms."
        for r in results
        for f in r.failures
    ]


def format_ms(value: float) -> str:
    """Format milliseconds: with one decimal place if below 100 ms, else as an integer."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def cpu_cells(result: ServeResult) -> tuple[str, ...]:
    """Return a result's table cells, in the order of `CPU_COLUMNS`.

    The first cell is the mean number of CPU cores that all processes of the server used. The other
    cells are CPU milliseconds per image of the server's main process, its front-end processes, its
    worker processes, and the client processes. If the server's CPU use was not measured, only the
    last cell is filled.
    """
    clients = _cpu_milliseconds(result.client.total_cores, result)
    if result.server is None:
        return "", "", "", "", clients
    threads = result.server.threads
    own = sum(thread.cores for thread in threads if thread.process == 0)
    front_ends = sum(thread.cores for thread in threads if _is_of_front_end(thread))
    workers = max(0.0, result.server.cores - own - front_ends)
    shares = (_cpu_milliseconds(share, result) for share in (own, front_ends, workers))
    return f"{result.server.cores:.2f}", *shares, clients


def thread_table(results: Sequence[ServeResult]) -> ResultTable:
    """Return a table of the server's CPU time per image, by load, process and thread."""
    return ResultTable(
        heading="CPU time by process and thread",
        columns=("load", "process", "thread", "threads", "CPU ms per image"),
        rows=[row for result in results for row in _thread_rows(result)],
    )


def _thread_rows(result: ServeResult) -> Iterator[tuple[str, ...]]:
    if result.server is None:
        return
    for thread in result.server.threads:
        if thread.cores >= _MIN_SHARE * result.server.cores:
            kind = "front end" if _is_of_front_end(thread) else "worker"
            process = f"{kind} {thread.process}" if thread.process else "server"
            milliseconds = _cpu_milliseconds(thread.cores, result)
            yield load_name(result.load), process, thread.name, str(thread.threads), milliseconds


def _is_of_front_end(thread: ThreadUsage) -> bool:
    return thread.process_name == FRONT_END_NAME


def _cpu_milliseconds(cores: float, result: ServeResult) -> str:
    return f"{1000 * cores / result.images_per_second:.2f}"

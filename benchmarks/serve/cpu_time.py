"""CPU time per image of a benchmark's server and client processes, and of the server's threads."""

from collections.abc import Iterator, Sequence
from typing import Final

from ...serving.front_ends.server import FRONT_END_NAME
from ..common.processes import ThreadUsage
from ..common.record import ResultTable
from .results import ServeResult, load_name

CPU_COLUMNS: Final = ("cores", "server", "front ends", "workers", "clients")

# Minimum fraction of the server's CPU time. The table omits threads that use less.
_MIN_SHARE: Final = 0.005


def cpu_cells(result: ServeResult) -> tuple[str, ...]:
    """Return a result's table cells, in the order of `CPU_COLUMNS`.

    The first cell is the mean number of CPU cores that all processes of the server used. The other
    cells are CPU milliseconds per image of the server's main process, its front-end processes, its
    worker processes, and the client processes. If the server's CPU use was not measured, only the
    last cell is filled.
    """
    clients = _milliseconds(result.client.total_cores, result)
    if result.server is None:
        return "", "", "", "", clients
    threads = result.server.threads
    own = sum(thread.cores for thread in threads if thread.process == 0)
    front_ends = sum(thread.cores for thread in threads if _is_of_front_end(thread))
    workers = max(0.0, result.server.cores - own - front_ends)
    shares = (_milliseconds(share, result) for share in (own, front_ends, workers))
    return f"{result.server.cores:.2f}", *shares, clients


def thread_table(results: Sequence[ServeResult]) -> ResultTable:
    """Return a table of the server's CPU time per image, by load, process and thread."""
    return ResultTable(
        heading="CPU time by process and thread",
        columns=("load", "process", "thread", "threads", "CPU ms per image"),
        rows=[row for result in results for row in _rows(result)],
    )


def _rows(result: ServeResult) -> Iterator[tuple[str, ...]]:
    if result.server is None:
        return
    for thread in result.server.threads:
        if thread.cores >= _MIN_SHARE * result.server.cores:
            kind = "front end" if _is_of_front_end(thread) else "worker"
            process = f"{kind} {thread.process}" if thread.process else "server"
            milliseconds = _milliseconds(thread.cores, result)
            yield load_name(result.load), process, thread.name, str(thread.threads), milliseconds


def _is_of_front_end(thread: ThreadUsage) -> bool:
    return thread.process_name == FRONT_END_NAME


def _milliseconds(cores: float, result: ServeResult) -> str:
    return f"{1000 * cores / result.images_per_second:.2f}"

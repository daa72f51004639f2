"""Function calls in child processes, and measurement of peak memory and CPU use."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from ...serving.host import visible_gpus

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Kinds of peak memory. cpu: resident memory of this process. torch: GPU memory reserved by torch,
# without the CUDA context. driver: all GPU memory in use, CUDA contexts included.
MemoryKind = Literal["cpu", "torch", "driver"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Number of memory samples that `measure_process_usage` takes.
_SAMPLES = 50


class ProcessError(Exception):
    """A child process ended before its work was complete."""


@dataclass(frozen=True)
class ThreadUsage:
    """CPU use of a group of threads: all threads of one name in one process."""

    # Index of the process. 0: the measured process. From 1 on: its descendants by ascending PID.
    process: int
    # Name of the process in top and ps.
    process_name: str
    # Name of the threads, without the number that some thread pools append. `main`: the process's
    # first thread.
    name: str
    # Number of threads in the group.
    threads: int
    # CPU time of the group divided by the wall-clock time.
    cores: float


@dataclass(frozen=True)
class ProcessUsage:
    """CPU and memory use of a process and its descendants during a time window."""

    # CPU time divided by the wall-clock time.
    cores: float
    # Total resident memory, sampled at equal intervals.
    memory_mib: list[float]
    # Threads that used CPU time and exist at the window's end, the busiest first.
    threads: list[ThreadUsage]


def iterate_in_process(
    function: Callable[_P, Iterable[_T]], *args: _P.args, **kwargs: _P.kwargs
) -> Iterator[_T]:
    """Call a function in a new process, and yield the items of the iterable that it returns.

    The new process inherits neither memory nor torch settings of earlier measurements.

    Args:
        function: Module-level function. The function, its arguments and the items are pickled.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.

    Raises:
        Exception: the exception of the function. A note of the exception holds the traceback from
            the new process.
        ProcessError: the process died.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_items, args=(sender, function, args, kwargs))
    process.start()
    sender.close()
    try:
        while True:
            try:
                item, error = receiver.recv()
            except (EOFError, OSError):  # OSError: it died while it sent an item
                break
            if error:
                raise error
            yield item
        process.join()
    finally:
        receiver.close()
        process.terminate()
        process.join()
    if process.exitcode:
        raise ProcessError(
            f"a benchmark process failed with exit code {process.exitcode}; stderr has the "
            "reason; code -9 usually means that memory ran out"
        )


def _send_items(
    sender: Connection, function: Callable[..., Iterable[Any]], args: Any, kwargs: Any
) -> None:
    try:
        for item in function(*args, **kwargs):
            sender.send((item, None))
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))  # pickling drops the traceback
        sender.send((None, error))


def call_in_processes(
    function: Callable[..., _T], arguments: Sequence[tuple[Any, ...]]
) -> list[_T]:
    """Call a function in several new processes at the same time.

    If one process fails, the others are terminated, because they may wait forever for the failed
    one.

    Args:
        function: Module-level function. The function, its arguments and results are pickled.
        arguments: Arguments of the function in each process, one tuple per process.

    Returns:
        One result per process, in the order of `arguments`.

    Raises:
        Exception: the exception of the first process that fails. A note of the exception holds the
            traceback from that process.
        ProcessError: a process died.
    """
    context = get_context("spawn")
    receivers, processes = [], []
    try:
        for own_arguments in arguments:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send_result, args=(sender, function, own_arguments))
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        results: dict[Any, _T] = {}
        while len(results) < len(receivers):
            for ready in wait([one for one in receivers if one not in results]):
                results[ready] = _received(ready)
        return [results[receiver] for receiver in receivers]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _send_result(
    sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _send_items(sender, lambda: [function(*arguments)], (), {})


def _received(receiver: Any) -> Any:
    try:
        result, error = receiver.recv()
    except (EOFError, OSError):
        raise ProcessError(
            "a benchmark process died without a result, probably because memory ran out; free "
            "memory and try again"
        ) from None
    if error:
        raise error
    return result


def reset_peak_memory() -> None:
    """Reset the peaks of this process's resident memory and of torch's reserved GPU memory."""
    with contextlib.suppress(OSError):  # Linux can forbid the reset; then the old peak stays
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_mib(kind: MemoryKind) -> float:
    """Return the peak memory use or, for the kind `driver`, the current memory use, in MiB.

    The argument `kind` selects the memory. Peaks are those since `reset_peak_memory`:

    - `cpu`: peak resident memory of this process.
    - `torch`: peak GPU memory reserved by torch.
    - `driver`: current memory use of torch's GPU 0, by all processes together.
    """
    # The driver reports no peak. The memory in use comes close to it, because libraries other than
    # torch keep the memory that they have allocated.
    if kind == "torch":
        import torch

        return torch.cuda.max_memory_reserved() / 2**20
    if kind == "driver":
        gpu, *_ = visible_gpus()
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        query.append(f"--id={gpu}")
        answer = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
        return float(answer.stdout)
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert peak is not None
    return int(peak[1]) / 1024


def measure_process_usage(pid: int, start: float, end: float) -> ProcessUsage:
    """Measure CPU and memory use of a process and its descendants. Block until `end`.

    Args:
        pid: Process ID of the process.
        start: Start of the measurement on the clock `time.monotonic`.
        end: End of the measurement on the same clock.

    Raises:
        ProcessError: The process has ended.
    """
    _sleep_until(start)
    before, memory_mib = _thread_ticks(pid), []
    first = {member: _ticks(stat) for member, stat in _running_tree(pid).items()}
    last = dict(first)
    for sample in range(1, _SAMPLES + 1):
        _sleep_until(start + (end - start) * sample / _SAMPLES)
        stats = _running_tree(pid)
        memory_mib.append(sum(int(stat[21]) for stat in stats.values()) * _PAGE_BYTES / 2**20)
        # Keeps the CPU time of descendants that have ended.
        last |= {member: _ticks(stat) for member, stat in stats.items()}
    ticks = sum(own - first.get(member, 0) for member, own in last.items())
    ticks_of_core = (end - start) * _TICKS_PER_S
    after = _thread_ticks(pid)
    members = sorted({thread.pid for thread in after}, key=lambda member: (member != pid, member))
    used: defaultdict[tuple[int, str, str], list[int]] = defaultdict(list)
    for thread, own in after.items():
        key = members.index(thread.pid), thread.process_name, thread.name
        used[key].append(own - before.get(thread, 0))
    threads = [
        ThreadUsage(*key, len(own), sum(own) / ticks_of_core)
        for key, own in sorted(used.items(), key=lambda item: -sum(item[1]))
        if sum(own)
    ]
    return ProcessUsage(ticks / ticks_of_core, memory_mib, threads)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class _Thread(NamedTuple):
    pid: int
    process_name: str
    number: int
    name: str


def _thread_ticks(pid: int) -> dict[_Thread, int]:
    """Map each thread of a process and of its descendants to its CPU time in ticks."""
    ticks = {}
    for member, (process_name, _) in _process_tree_stats(pid).items():
        for folder in Path(f"/proc/{member}/task").glob("*"):
            with contextlib.suppress(OSError):  # the thread has ended
                name, fields = _parse_stat((folder / "stat").read_text())
                number = int(folder.name)
                name = "main" if number == member else re.sub(r"[-_:]?\d+$", "", name)
                ticks[_Thread(member, process_name, number, name)] = _ticks(fields)
    return ticks


def _running_tree(pid: int) -> dict[int, list[str]]:
    """Return the `/proc/PID/stat` fields of a process and its descendants, by PID.

    Raises:
        ProcessError: The process has ended.
    """
    stats = _process_tree_stats(pid)
    if pid not in stats or stats[pid][1][0] == "Z":  # a zombie has ended, but its parent has not
        raise ProcessError("the server ended during the measurement; its log has the reason")
    return {member: fields for member, (_, fields) in stats.items()}


def _ticks(stat: Sequence[str]) -> int:
    """Return the user and system CPU time of a parsed `/proc/PID/stat` text, in ticks."""
    return int(stat[11]) + int(stat[12])


def _process_tree_stats(pid: int) -> dict[int, tuple[str, list[str]]]:
    """Return the name and the `/proc/PID/stat` fields of a process and its descendants, by PID.

    The list of fields begins with field 3 of proc_pid_stat(5). Index 0 is the state, index 1 the
    parent's PID, indices 11 and 12 are ticks in user and system mode, and index 21 is the number of
    resident pages.
    """
    stats: dict[int, tuple[str, list[str]]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended
                stats[int(folder.name)] = _parse_stat((folder / "stat").read_text())
    tree = {pid} & stats.keys()
    while added := {p for p, (_, stat) in stats.items() if int(stat[1]) in tree} - tree:
        tree |= added
    return {member: stats[member] for member in tree}


def _parse_stat(text: str) -> tuple[str, list[str]]:
    """Parse a `/proc/PID/stat` text. Return the name (field 2) and the list of fields 3 to last."""
    # The second field is the name in brackets, which may contain spaces and brackets.
    head, _, fields = text.rpartition(")")
    return head.partition("(")[2], fields.split()

"""Machine description, functions in child processes, peak memory, CPU use of a process tree."""

import contextlib
import gc
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from ...serving.host import gpu_names, installed_versions

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Kinds of peak memory. cpu: resident memory of this process. torch: GPU memory reserved by torch,
# without the CUDA context. driver: all GPU memory in use, CUDA contexts included.
MemoryKind = Literal["cpu", "torch", "driver"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Memory samples that `measure_process_usage` takes.
_SAMPLES = 50

_PACKAGES = (
    "maskrcnn-trt",
    "numpy",
    "nvidia-cuda-nvrtc",
    "nvidia-cudnn-cu13",
    "onnxruntime",
    "onnxruntime-gpu",
    "pycocotools",
    "torch",
    "torchvision",
    "triton",
)


@dataclass(frozen=True)
class MachineInfo:
    """Hardware and package versions of a machine."""

    cpu: str
    # Number of CPU cores that this process may use.
    cores: int
    # Name and driver version of each NVIDIA GPU.
    gpus: tuple[str, ...]
    python: str
    # Versions of the installed packages that affect speed.
    packages: dict[str, str]


def describe_machine() -> MachineInfo:
    """Return hardware and package versions of this machine, without importing the packages."""
    return MachineInfo(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        gpus=gpu_names(),
        python=platform.python_version(),
        packages=installed_versions(_PACKAGES),
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


class ProcessError(Exception):
    """A child process ended before its work was complete."""


@dataclass(frozen=True)
class ProcessUsage:
    """CPU and memory use of a process and its descendants during a time window."""

    # CPU time per wall-clock time.
    cores: float
    # Total resident memory, sampled at equal intervals.
    memory_mib: list[float]


def iterate_in_process(
    function: Callable[_P, Iterable[_T]], *args: _P.args, **kwargs: _P.kwargs
) -> Iterator[_T]:
    """Call a function in a new process, and yield the items of the iterable that it returns.

    The new process inherits neither memory nor torch settings of earlier measurements.

    Args:
        function: Module-level function. It, its arguments and its items are pickled.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.

    Raises:
        ProcessError: the process died, or the function raised; its traceback is on stderr.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_items, args=(sender, function, args, kwargs))
    process.start()
    sender.close()
    try:
        while True:
            yield receiver.recv()
    except EOFError:
        process.join()
    finally:
        receiver.close()
        process.terminate()
        process.join()
    if process.exitcode:
        raise ProcessError(f"the measuring process ended with exit code {process.exitcode}")


def _send_items(
    sender: Connection, function: Callable[..., Iterable[Any]], args: Any, kwargs: Any
) -> None:
    for item in function(*args, **kwargs):
        sender.send(item)


def reset_peak_memory() -> None:
    """Reset the peak memory of this process and of torch on the GPU."""
    with contextlib.suppress(OSError):  # Linux can forbid the reset; then the old peak stays
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_mib(kind: MemoryKind) -> float:
    """Return the peak memory since the last reset in MiB; for `driver`, the memory in use now."""
    # The driver reports no peak, but libraries that allocate without torch keep their memory.
    if kind == "torch":
        import torch

        return torch.cuda.max_memory_reserved() / 2**20
    if kind == "driver":
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        answer = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
        return float(answer.stdout)
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert peak is not None
    return int(peak[1]) / 1024


def measure_process_usage(pid: int, start: float, end: float) -> ProcessUsage:
    """Measure a process and its descendants from `start` to `end`, and block until `end`.

    Both are times of `time.monotonic`.
    """
    _sleep_until(start)
    cpu_s, memory_mib = _cpu_seconds(pid), []
    for sample in range(1, _SAMPLES + 1):
        _sleep_until(start + (end - start) * sample / _SAMPLES)
        memory_mib.append(_resident_mib(pid))
    return ProcessUsage((_cpu_seconds(pid) - cpu_s) / (end - start), memory_mib)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _cpu_seconds(pid: int) -> float:
    stats = _process_tree_stats(pid)
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / _TICKS_PER_S


def _resident_mib(pid: int) -> float:
    return sum(int(stat[21]) for stat in _process_tree_stats(pid)) * _PAGE_BYTES / 2**20


def _process_tree_stats(pid: int) -> list[list[str]]:
    """Return the fields of `/proc/PID/stat` after the name, for a process and its descendants.

    They begin with field 3 of proc_pid_stat(5): [1] is the parent's PID, [11] and [12] are ticks
    in user and system mode, and [21] is the number of resident pages.
    """
    stats: dict[int, list[str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:  # the process has ended
                continue
            # The second field is the name in brackets, which may contain spaces and brackets.
            stats[int(folder.name)] = text.rpartition(")")[2].split()
    tree = {pid} & stats.keys()
    while added := {p for p, stat in stats.items() if int(stat[1]) in tree} - tree:
        tree |= added
    return [stats[member] for member in tree]

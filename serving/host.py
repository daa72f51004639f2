"""The machine and what is installed on it, found out without importing any of that."""

import os
import re
import resource
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMORY_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Files of cgroups 2 and 1."""


def gpu_names() -> tuple[str, ...]:
    """Name and driver of each NVIDIA GPU that nvidia-smi lists; none, too, where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.SubprocessError):
        return ()
    names = (line.rsplit(", ", 1) for line in answer.stdout.splitlines())
    return tuple(f"{name} (driver {driver})" for name, driver in names)


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def machine_memory() -> dict[str, int]:
    """Bytes of the machine's memory by the names that Linux gives them."""
    told = Path("/proc/meminfo").read_text()
    return {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", told, re.M)}


def available_memory() -> int:
    """Bytes that this process may still take: what is free, within its limits."""
    free = machine_memory()["MemAvailable"]
    of_cgroups = [_number_in(_CGROUPS / name) for name in _MEMORY_LIMITS]
    of_process, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [*of_cgroups, None if of_process == resource.RLIM_INFINITY else of_process]
    return min([free, *(limit for limit in limits if limit is not None)])


def available_cores() -> float:
    """Cores that this process may use, which containers count in fractions."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUPS / "cpu.max").read_text().split()
    except OSError:
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

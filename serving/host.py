"""Properties of this machine: GPUs, memory, CPU cores and installed packages."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from .errors import BackendError

CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
# Time limit in seconds for CUDA to list the GPUs.
_CUDA_TIMEOUT_S: Final = 60.0
# Prints the bus ID of each GPU that CUDA itself lists, so MIG, containers and environment variables
# are respected.
_BUS_IDS_PROGRAM: Final = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit
count, gpu, bus_id = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(count))
for index in range(count.value):
    cuda.cuDeviceGet(ctypes.byref(gpu), index)
    cuda.cuDeviceGetPCIBusId(bus_id, len(bus_id), gpu)
    print(bus_id.value.decode())
"""

_CGROUPS: Final = Path("/sys/fs/cgroup")
# Files that hold the memory limit of the cgroup, in versions 2 and 1.
_MEMORY_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")


def gpu_names() -> tuple[str, ...]:
    """Return name and driver version of each NVIDIA GPU. Empty if nvidia-smi does not work."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.SubprocessError):
        return ()
    names = (line.rsplit(", ", 1) for line in result.stdout.splitlines())
    return tuple(f"{name} (driver {driver})" for name, driver in names)


def visible_gpus() -> list[str]:
    """Return the GPUs that CUDA lists, each as a value for CUDA_VISIBLE_DEVICES."""
    count = len(gpu_bus_ids())
    names = os.environ.get(CUDA_VISIBLE_DEVICES)
    return names.split(",")[:count] if names else [str(index) for index in range(count)]


def gpu_bus_ids() -> list[str]:
    """Return the PCI bus ID of each GPU that CUDA finds. MIG instances of one GPU share its ID.

    Raises:
        BackendError: the driver does not respond.
    """
    # A separate process, because a process that has loaded CUDA keeps every GPU open.
    command = [sys.executable, "-I", "-S", "-c", _BUS_IDS_PROGRAM]
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=_CUDA_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"CUDA does not list the GPUs within {_CUDA_TIMEOUT_S:g} s; check whether nvidia-smi "
            "responds, and restart the machine if it hangs"
        ) from None
    return result.stdout.splitlines()


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of the distributions that are installed, without importing them."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def machine_memory() -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes, by name."""
    text = Path("/proc/meminfo").read_text()
    return {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}


def available_memory() -> int:
    """Return the free memory in bytes, within the limits of this process and its cgroup."""
    free = machine_memory()["MemAvailable"]
    cgroup_limits = [_number_in(_CGROUPS / name) for name in _MEMORY_LIMITS]
    process_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [*cgroup_limits, None if process_limit == resource.RLIM_INFINITY else process_limit]
    return min([free, *(limit for limit in limits if limit is not None)])


def available_cores() -> float:
    """Return the number of CPU cores that this process may use. cgroup limits can be fractions."""
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

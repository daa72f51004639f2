"""Properties of this machine: GPUs, memory, CPU cores and installed packages."""

import contextlib
import itertools
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from .errors import BackendError

CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
# Time limit in seconds for CUDA to list the GPUs.
_CUDA_TIMEOUT_S: Final = 60.0
# Program that prints the PCI bus ID of each GPU that CUDA lists, so that MIG, containers and
# environment variables are respected.
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
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")


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
    """Return the free host memory in bytes, within the limits of this process and its cgroups.

    It is the lowest of the machine's available memory, `memory_limit`, and the memory that is left
    below the limit of each cgroup of the process.
    """
    free = [max(0, memory.limit - memory.used) for memory in _cgroup_memory()]
    return min(machine_memory()["MemAvailable"], memory_limit(), *free)


def memory_limit() -> int:
    """Return the total host memory in bytes that this process may use, in use or not.

    It is the lowest of the machine's memory, the process's RLIMIT_AS, and its cgroups' limits.
    """
    limits = [machine_memory()["MemTotal"], *(memory.limit for memory in _cgroup_memory())]
    process_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(limits if process_limit == resource.RLIM_INFINITY else [*limits, process_limit])


def available_cores() -> float:
    """Return the number of CPU cores that this process may use. cgroup limits can be fractions."""
    limits: list[float] = [len(os.sched_getaffinity(0))]
    for cgroup in _own_cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            quota, period = map(int, (cgroup / "cpu.max").read_text().split())
            limits.append(quota / period)
    return min(limits)


def name_thread(name: str) -> None:
    """Set the name of the calling thread in top, ps and the benchmarks: up to 15 characters."""
    # Python itself does this only from 3.14 on.
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def notify_service_manager(state: str) -> None:
    """Send systemd a state, such as READY=1, if this process is a service of type notify."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with (
        contextlib.suppress(OSError),  # without the message, systemd itself reports a timeout
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection,
    ):
        if address.startswith("@"):  # an abstract address, which begins with a zero byte
            address = f"\0{address[1:]}"
        connection.sendto(state.encode(), address)


class _CgroupMemory(NamedTuple):
    """Memory limit of a cgroup and its memory in use, in bytes."""

    limit: int
    # Without the page cache that the kernel frees first.
    used: int


def _cgroup_memory() -> Iterator[_CgroupMemory]:
    """Yield the memory limit and use of each cgroup that contains this process and has a limit."""
    names = (
        ("memory.max", "memory.current"),  # version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for cgroup, (limit, used) in itertools.product(_own_cgroups("memory"), names):
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            limit_bytes = int((cgroup / limit).read_text())
            yield _CgroupMemory(limit_bytes, _used_bytes(cgroup, used))


def _own_cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of the cgroups that contain this process and have a controller."""
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        folder = root / path.lstrip("/")
        # Within a container, `path` may be that of the host, and only `root` exists.
        yield from (p for p in (folder, *folder.parents) if p.is_relative_to(root))


def _used_bytes(cgroup: Path, name: str) -> int:
    """Return a cgroup's memory in use in bytes, without the inactive page cache; 0 if unknown.

    `name` is the file in the folder `cgroup` that contains the memory in use.
    """
    try:
        used = int((cgroup / name).read_text())
        entries = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:  # some sandboxes have only the limit
        return 0
    # Version 1 counts nested cgroups only in the entry with the prefix.
    return used - int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))

"""Memory and CPU cores that this process may use, within the limits of its cgroups."""

import contextlib
import ctypes
import itertools
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
# Numbers of two parameters of `mallopt` in glibc's malloc.h, and the largest value of a C int.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES: Final = 2**31 - 1
# Maximum value of `_M_MMAP_THRESHOLD` in older versions of glibc, such as 2.34.
_OLD_MMAP_THRESHOLD: Final = 32 << 20


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
    """Return the host memory in bytes that this process may use, including memory already in use.

    It is the lowest of the machine's memory, the process's RLIMIT_AS, and its cgroups' limits.
    """
    limits = [machine_memory()["MemTotal"], *(memory.limit for memory in _cgroup_memory())]
    process_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(limits if process_limit == resource.RLIM_INFINITY else [*limits, process_limit])


def available_cores() -> float:
    """Return the number of CPU cores that this process may use.

    A cgroup can limit CPU time to a fractional number of cores, such as 1.5. CPU limits of cgroups
    version 1 are ignored.
    """
    limits: list[float] = [len(os.sched_getaffinity(0))]
    for cgroup in _own_cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            quota, period = map(int, (cgroup / "cpu.max").read_text().split())
            limits.append(quota / period)
    return min(limits)


def keep_freed_memory() -> None:
    """Let this process keep freed host memory for its next allocations, up to 2 GiB.

    By default, glibc returns large freed blocks to the operating system. Mapping their pages again
    takes a tenth of a training step on a CPU. On other C libraries, do nothing.
    """
    with contextlib.suppress(AttributeError):  # no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLD_MMAP_THRESHOLD)


class _CgroupMemory(NamedTuple):
    """Memory limit of a cgroup and its memory in use, in bytes."""

    limit: int
    # Without the inactive page cache, which the kernel frees when memory is short.
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
    """Yield the folders of this process's cgroups, and of the ancestors of these cgroups.

    In cgroups version 1, only the cgroups of `controller`, such as `memory`, are included. In
    version 2, all controllers share the same cgroups.
    """
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container, `path` may be a path on the host. Then only the folder `root` exists.
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
    # In version 1, only the entry with the prefix `total_` includes nested cgroups.
    return used - int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))

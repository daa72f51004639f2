"""What a process and those it started take of the machine, as Linux tells."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLES = 50
"""Of the memory, spread over the time of a measurement."""


@dataclass(frozen=True)
class ProcessUsage:
    """What was taken over some time."""

    cores: float
    """CPU time by time, children included."""
    memory_mib: list[float]
    """Resident memory of all of them at equal distances in time."""


def usage_between(pid: int, start: float, end: float) -> ProcessUsage:
    """Watch a process between two moments of the monotonic clock, and return at the later one."""
    _sleep_until(start)
    cpu_s, memory_mib = _cpu_seconds(pid), []
    for sample in range(1, _SAMPLES + 1):
        _sleep_until(start + (end - start) * sample / _SAMPLES)
        memory_mib.append(_resident_mib(pid))
    return ProcessUsage((_cpu_seconds(pid) - cpu_s) / (end - start), memory_mib)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _cpu_seconds(pid: int) -> float:
    stats = _family(pid).values()
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / _TICKS_PER_S


def _resident_mib(pid: int) -> float:
    return sum(int(stat[21]) for stat in _family(pid).values()) * _PAGE_BYTES / 2**20


def _family(pid: int) -> dict[int, list[str]]:
    """Fields of `/proc/PID/stat` from the third on, of a process and all that descend from it.

    There, fields 4, 14, 15 and 24 are the parent, ticks in user and system mode, and pages.
    """
    stats: dict[int, list[str]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            # The second field is the name in brackets, which may hold anything.
            stats[int(folder.name)] = text.rpartition(")")[2].split()
    family = {pid} & stats.keys()
    while added := {p for p, stat in stats.items() if int(stat[1]) in family} - family:
        family |= added
    return {member: stats[member] for member in family}

"""What the machine's CPUs do and its memory holds, under the names and in the units of Triton."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..host import machine_memory


class CpuCollector(Collector):
    """What Linux tells of the machine, of which a container may be given less."""

    def __init__(self) -> None:
        """Watch from here on."""
        self._before = _cpu_times()

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        before, now = self._before, _cpu_times()
        self._before = now
        busy, idle = (max(0, new - old) for new, old in zip(now, before, strict=True))
        yield GaugeMetricFamily(
            "nv_cpu_utilization",
            "Share of the CPUs' time that was used since it was last asked for.",
            busy / max(1, busy + idle),
        )
        memory = machine_memory()
        total, used = memory["MemTotal"], memory["MemTotal"] - memory["MemAvailable"]
        yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "Memory of the machine.", total)
        yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "Memory of it that is taken.", used)


class _CpuTimes(NamedTuple):
    """Of all CPUs since the machine started, in ticks of the kernel."""

    busy: int
    idle: int


def _cpu_times() -> _CpuTimes:
    totals = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, idle, waiting, *interrupts = map(int, totals[1:9])
    return _CpuTimes(user + nice + system + sum(interrupts), idle + waiting)

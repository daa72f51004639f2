"""Prometheus collector for CPU and memory, with Triton's metric names."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...model.host_resources import machine_memory

# Interval in seconds in which the CPU utilisation is measured.
_INTERVAL_S = 2.0


class CpuCollector(Collector):
    """Collector of the whole machine's CPU utilisation and memory, even within a container."""

    def __init__(self) -> None:
        self._utilization = 0.0

    async def run(self) -> None:
        """Measure the CPU utilisation every two seconds, as Triton does, until cancelled."""
        before = _cpu_times()
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                now = _cpu_times()
            except OSError:  # no free file descriptor: keep the last value
                continue
            busy, idle = (max(0, new - old) for new, old in zip(now, before, strict=True))
            self._utilization, before = busy / max(1, busy + idle), now

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        documentation = "Share of CPU time in use in the last two seconds."
        yield GaugeMetricFamily("nv_cpu_utilization", documentation, self._utilization)
        memory = machine_memory()
        total, used = memory["MemTotal"], memory["MemTotal"] - memory["MemAvailable"]
        yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "Memory of the machine.", total)
        yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "Memory of the machine in use.", used)


def _cpu_times() -> tuple[int, int]:
    """Return busy and idle time of all CPUs since the machine started, in kernel ticks."""
    totals = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, idle, io_wait, *interrupts = map(int, totals[1:9])
    return user + nice + system + sum(interrupts), idle + io_wait

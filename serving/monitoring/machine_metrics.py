"""Prometheus metrics of GPUs, CPU, memory and connections, and measurement of event loop lag."""

import asyncio
import contextlib
import functools
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pynvml
from prometheus_client.core import CounterMetricFamily as _Counter
from prometheus_client.core import GaugeMetricFamily as _Gauge
from prometheus_client.core import Metric
from prometheus_client.core import UnknownMetricFamily as _Untyped
from prometheus_client.registry import Collector

from ...model.host_resources import machine_memory
from ..errors import BackendError
from ..host import child_process_ids, gpu_bus_ids

_log = logging.getLogger(__name__)

# Measurement of the event loop lag, in seconds: interval between two measurements, length of a
# window of measurements, and lag in a window above which a warning is logged.
_LAG_INTERVAL_S = 0.1
_LAG_WINDOW_S = 10.0
_LAG_WARNING_S = 0.1

_ENERGY: Final = "nv_energy_consumption"
# GPU metrics: help text, and function that reads the value from an NVML device handle.
GPU_METRICS: Final[Mapping[str, tuple[str, Callable[[Any], float]]]] = {
    "nv_gpu_utilization": (
        "Share of recent time in which the GPU was busy.",
        lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "nv_gpu_memory_total_bytes": ("GPU memory.", lambda gpu: _gpu_memory(gpu).total),
    "nv_gpu_memory_used_bytes": ("GPU memory in use.", lambda gpu: _gpu_memory(gpu).used),
    "nv_gpu_power_usage": (
        "Power draw of the GPU in watts.",
        lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    ),
    "nv_gpu_power_limit": (
        "Power limit of the GPU in watts.",
        lambda gpu: pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000,
    ),
    _ENERGY: (
        "Energy drawn by the GPU since the server started, in joules.",
        lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    ),
}

# Interval in seconds in which the CPU utilisation is measured.
_CPU_INTERVAL_S = 2.0

# States in /proc/net/tcp.
_ESTABLISHED: Final = "01"
_LISTEN: Final = "0A"

_SOCKET = re.compile(r"socket:\[(\d+)\]")


class GpuCollector(Collector):
    """Collector of NVML metrics of the GPUs visible to CUDA. Without GPUs it yields nothing."""

    # NVML is opened anew for each collection, so that the driver can be unloaded in between.

    def __init__(self) -> None:
        # First value of each GPU's energy counter in joules, by the GPU's UUID.
        self._first_energy: dict[str, float] = {}
        # A thread reads the first values, because an idle GPU may take seconds to respond.
        threading.Thread(target=self._read_gpus, name="gpu metrics", daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of the GPUs."""
        gpus = self._read_gpus()
        for name, (documentation, _) in GPU_METRICS.items():
            # The energy is one of Triton's counters, which are exported without a type; see
            # `prometheus.ModelCollector`.
            kind = _Untyped if name == _ENERGY else _Gauge
            values = {(uuid,): own[name] for uuid, own in gpus.items() if name in own}
            if values:
                yield metric_family(kind, name, documentation, ("gpu_uuid",), values)

    @functools.cached_property
    def _bus_ids(self) -> list[str]:
        return gpu_bus_ids()

    def _read_gpus(self) -> dict[str, dict[str, float]]:
        """Return metric values by GPU UUID and metric name."""
        gpus = {}
        with _skip_errors("the GPUs"), _open_nvml():
            for bus_id in self._bus_ids:
                with _skip_errors(bus_id):
                    gpu = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
                    gpus[pynvml.nvmlDeviceGetUUID(gpu)] = _gpu_values(gpu)
        for uuid, values in gpus.items():
            if _ENERGY in values:
                energy = values[_ENERGY]
                # The counter restarts at zero when the driver is reloaded.
                first = min(energy, self._first_energy.get(uuid, energy))
                self._first_energy[uuid] = first
                values[_ENERGY] = energy - first
        return gpus


def _gpu_values(gpu: Any) -> dict[str, float]:
    """Return a GPU's metric values by name. Values that the driver does not report are omitted."""
    values = {}
    for name, (_, read) in GPU_METRICS.items():
        with _skip_errors(name):
            values[name] = read(gpu)
    return values


def _gpu_memory(gpu: Any) -> Any:
    # Version 2 of the NVML structure does not count the driver's reserved memory as used.
    return pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2)


@contextlib.contextmanager
def _open_nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


@contextlib.contextmanager
def _skip_errors(subject: str) -> Iterator[None]:
    """In the `with` block, suppress NVML errors and BackendError, and log them at level debug.

    `subject` is the GPU or metric in the log message.
    """
    # Many GPUs do not report all metrics.
    try:
        yield
    except (pynvml.NVMLError, BackendError) as error:
        _log.debug("cannot read %s: %s", subject, error)


class CpuCollector(Collector):
    """Collector of the whole machine's CPU utilisation and memory, even within a container."""

    def __init__(self) -> None:
        self._utilization = 0.0

    async def run(self) -> None:
        """Measure the CPU utilisation every two seconds, as Triton does, until cancelled."""
        before = None
        while True:
            with contextlib.suppress(OSError):  # no free file descriptor: keep the last value
                now = _cpu_times()
                busy, idle = (max(0, a - b) for a, b in zip(now, before or now, strict=True))
                self._utilization, before = busy / max(1, busy + idle), now
            await asyncio.sleep(_CPU_INTERVAL_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the latest CPU utilisation of the machine, and its memory size and use."""
        documentation = "Share of CPU time in use in the last two seconds."
        yield _Gauge("nv_cpu_utilization", documentation, self._utilization)
        memory = machine_memory()
        total, used = memory["MemTotal"], memory["MemTotal"] - memory["MemAvailable"]
        yield _Gauge("nv_cpu_memory_total_bytes", "Memory of the machine.", total)
        yield _Gauge("nv_cpu_memory_used_bytes", "Memory of the machine in use.", used)


def _cpu_times() -> tuple[int, int]:
    """Return busy and idle time of all CPUs since the machine started, in kernel ticks."""
    totals = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, idle, io_wait, *interrupts = map(int, totals[1:9])
    return user + nice + system + sum(interrupts), idle + io_wait


class _Socket(NamedTuple):
    port: int
    state: str


class ConnectionCollector(Collector):
    """Collector of the number of open TCP connections per listening port.

    The ports are those on which this process or one of its child processes listens.
    """

    # Read from the kernel's tables, because gRPC does not report its connections to Python.

    def collect(self) -> Iterator[Metric]:
        """Yield the current number of connections of each listening port."""
        sockets = list(_own_sockets())
        established = Counter(socket.port for socket in sockets if socket.state == _ESTABLISHED)
        family = _Gauge(
            "maskrcnn_connections", "Open connections by port of the server.", labels=("port",)
        )
        for port in sorted({socket.port for socket in sockets if socket.state == _LISTEN}):
            family.add_metric((str(port),), established[port])
        yield family


def _own_sockets() -> Iterator[_Socket]:
    """Yield the local port and the state of each TCP socket of this process and its children."""
    processes = os.getpid(), *child_process_ids()
    inodes = {inode for process in processes for inode in _socket_inodes(process)}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if inode in inodes:
                    yield _Socket(int(local.rpartition(":")[2], 16), state)


def _socket_inodes(process: int) -> Iterator[str]:
    folder = Path("/proc", str(process), "fd")
    # FileNotFoundError: the process has ended. PermissionError: it has ended, but its parent has
    # not waited for it yet.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for descriptor in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
                if match := _SOCKET.fullmatch(os.readlink(folder / descriptor)):
                    yield match[1]


class LoopLag:
    """Measurement of the event loop's lag: the delay with which `asyncio.sleep` wakes a task."""

    def __init__(self) -> None:
        # Latest measurement, in seconds.
        self.last_s = 0.0
        # Maximum since the start of the previous window, in seconds.
        self.worst_s = 0.0

    async def run(self) -> None:
        """Measure the event loop's lag until cancelled.

        Log a warning after each window of 10 s in which a lag exceeded 0.1 s.
        """
        while True:
            worst_s = await self._worst_of_window()
            self.worst_s = worst_s
            if worst_s > _LAG_WARNING_S:
                _log.warning(
                    "the event loop was up to %.0f ms late in the last %.0f s; the server may need "
                    "more CPU cores",
                    1000 * worst_s,
                    _LAG_WINDOW_S,
                )

    async def _worst_of_window(self) -> float:
        loop = asyncio.get_running_loop()
        end = loop.time() + _LAG_WINDOW_S
        worst_s = 0.0
        while (start := loop.time()) < end:
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.last_s = max(0.0, loop.time() - start - _LAG_INTERVAL_S)
            worst_s = max(worst_s, self.last_s)
            self.worst_s = max(self.worst_s, worst_s)
        return worst_s


def metric_family(
    kind: type[_Untyped] | type[_Gauge] | type[_Counter],
    name: str,
    documentation: str,
    labels: Sequence[str],
    values: Mapping[Any, float],
) -> Metric:
    """Return a Prometheus metric family with one sample per entry of `values`.

    Each key of `values` is a tuple of label values, in the order of `labels`.
    """
    family = kind(name, documentation, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family

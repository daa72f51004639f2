"""What GPUs do and take, under the names and in the units of Triton."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pynvml
from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from ..engines.placement import gpu_bus_ids
from ..errors import BackendError

_log = logging.getLogger(__name__)

_Read = Callable[[Any], float]
"""Reads a value of the GPU of a handle."""

_ENERGY: Final = "nv_energy_consumption"
_VALUES: Final[Mapping[str, tuple[str, _Read]]] = {
    "nv_gpu_utilization": (
        "Share of the time in which the GPU computed, of late.",
        lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "nv_gpu_memory_total_bytes": ("Memory of the GPU.", lambda gpu: _memory(gpu).total),
    "nv_gpu_memory_used_bytes": ("Memory of it that is taken.", lambda gpu: _memory(gpu).used),
    "nv_gpu_power_usage": (
        "Watts that the GPU draws.",
        lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    ),
    "nv_gpu_power_limit": (
        "Watts that the GPU may draw.",
        lambda gpu: pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000,
    ),
    _ENERGY: (
        "Joules that the GPU drew since the server started.",
        lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    ),
}
"""Metrics, what they mean, and how they are read."""

GPU_METRICS: Final = tuple(_VALUES)
"""Their names."""


class GpuCollector(Collector):
    """What NVML tells of the GPUs that CUDA finds; nothing where there is none.

    NVML is opened for each answer anew, so that a driver may go and come back in between.
    """

    def __init__(self) -> None:
        """Count energy from here on."""
        self._energy_before: dict[str, float] = {}
        # Elsewhere, since a GPU that nobody uses may take seconds to answer.
        threading.Thread(target=self._gpus, name="gpu metrics", daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        gpus = self._gpus()
        for name, (documentation, _) in _VALUES.items():
            # As other counts of Triton, it has no type.
            kind = UnknownMetricFamily if name == _ENERGY else GaugeMetricFamily
            family = kind(name, documentation, labels=("gpu_uuid",))
            for uuid, values in gpus.items():
                if name in values:
                    family.add_metric((uuid,), values[name])
            if family.samples:
                yield family

    @functools.cached_property
    def _bus_ids(self) -> list[str]:
        return gpu_bus_ids()

    def _gpus(self) -> dict[str, dict[str, float]]:
        """What each GPU, by its UUID, says of itself: values by the metrics' names."""
        gpus = {}
        with _noted("no GPU"), _open_nvml():
            for bus_id in self._bus_ids:
                with _noted(bus_id):
                    gpu = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
                    gpus[pynvml.nvmlDeviceGetUUID(gpu)] = _values(gpu)
        for uuid, values in gpus.items():
            if _ENERGY in values:
                energy = values[_ENERGY]
                # A driver that was loaded anew counts from zero.
                before = min(energy, self._energy_before.get(uuid, energy))
                self._energy_before[uuid] = before
                values[_ENERGY] = energy - before
        return gpus


def _values(gpu: Any) -> dict[str, float]:
    """Those that a GPU reports."""
    values = {}
    for name, (_, read) in _VALUES.items():
        with _noted(name):
            values[name] = read(gpu)
    return values


def _memory(gpu: Any) -> Any:
    # The second version tells what is taken without what the driver keeps for itself.
    return pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2)


@contextlib.contextmanager
def _open_nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


@contextlib.contextmanager
def _noted(what: str) -> Iterator[None]:
    """Leave out what the driver does not tell, which is an ordinary case."""
    try:
        yield
    except (pynvml.NVMLError, BackendError) as error:
        _log.debug("%s: %s", what, error)

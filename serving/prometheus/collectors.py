"""Prometheus collectors for models and GPUs (Triton's metric names), and the event loop lag."""

import asyncio
import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import pynvml
from prometheus_client.core import CounterMetricFamily as _Counter
from prometheus_client.core import GaugeMetricFamily as _Gauge
from prometheus_client.core import Metric
from prometheus_client.core import UnknownMetricFamily as _Untyped
from prometheus_client.registry import Collector

from ...model.bundle.manifest import MODEL_VERSION
from ..errors import BackendError
from ..host import gpu_bus_ids
from ..monitoring.metrics import TRITON_REASONS, ModelStatistics
from ..pipeline.model_repository import ModelRepository
from ..pipeline.pipeline import Pipeline
from ..pipeline.served_model import ServedModel

_log = logging.getLogger(__name__)

_STATS: Final = "inference_stats"
# Triton's metrics, without the prefix nv_inference_: help text, and path of the value in the
# ModelStatistics message.
_TRITON: Final = {
    "request_success": ("Successful requests.", f"{_STATS}.success.count"),
    "count": ("Images of successful requests.", "inference_count"),
    "exec_count": ("Batches with images of successful requests.", "execution_count"),
    "request_duration_us": ("Duration of successful requests.", f"{_STATS}.success.ns"),
    **{
        f"{stage}_duration_us": (f"{name} time of successful requests.", f"{_STATS}.{stage}.ns")
        for stage, name in (
            ("queue", "Queue"),
            ("compute_input", "Preprocessing"),
            ("compute_infer", "Inference"),
            ("compute_output", "Postprocessing"),
        )
    },
}
_VERSIONED: Final = ("model", "version")

# Event loop lag in seconds: interval of the measurements, length of a window, and lag in a window
# above which a warning is logged.
_LAG_INTERVAL_S = 0.1
_LAG_WINDOW_S = 10.0
_LAG_WARNING_S = 0.1

_ENERGY: Final = "nv_energy_consumption"
# GPU metrics: help text, and function that reads the value from an NVML device handle.
_GPU_VALUES: Final[Mapping[str, tuple[str, Callable[[Any], float]]]] = {
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

GPU_METRICS: Final = tuple(_GPU_VALUES)


class ModelCollector(Collector):
    """Collector of the request statistics, state and admission slots of all models."""

    # OpenMetrics requires that the names of counters end in `_total`. The names of Triton's
    # counters do not, so these are exported without a type.

    def __init__(self, models: ModelRepository) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        counted = self._models.resources.telemetry.metrics.statistics
        # A reload can change names, so there may be counts of names that are not served any more.
        names = {*self._models.states, *list(counted)}
        models = [pipeline.model for pipeline in self._models.pipelines]
        versions = {name: model.version for model in models for name in model.names}
        statistics = {
            (name, versions.get(name, MODEL_VERSION)): counted.get(name, ModelStatistics())
            for name in names
        }
        yield from _triton_metrics(statistics)
        yield from _model_metrics(models)
        yield from _slot_metrics(self._models.pipelines)


def _triton_metrics(statistics: Mapping[tuple[str, str], ModelStatistics]) -> Iterator[Metric]:
    messages = {key: own.message(*key) for key, own in statistics.items()}
    for metric, (documentation, path) in _TRITON.items():
        value = attrgetter(path)
        unit = 1000 if path.endswith(".ns") else 1
        values = {key: value(own) // unit for key, own in messages.items()}
        yield _family(_Untyped, f"nv_inference_{metric}", documentation, _VERSIONED, values)
    failures = {
        (*key, reason): own.failures.get(reason, 0)
        for key, own in statistics.items()
        for reason in TRITON_REASONS
    }
    metric, documentation = "nv_inference_request_failure", "Failed requests."
    yield _family(_Untyped, metric, documentation, (*_VERSIONED, "reason"), failures)


def _model_metrics(models: Sequence[ServedModel]) -> Iterator[Metric]:
    batchers = {
        (model.manifest.model_name, precision): batcher
        for model in models
        for precision, batcher in model.batchers.items()
    }
    metric, documentation = "nv_inference_pending_request_count", "Images waiting for a batch."
    waiting = sum((batcher.waiting for batcher in batchers.values()), Counter())
    pending = {(name, model.version): waiting[name] for model in models for name in model.names}
    yield _family(_Gauge, metric, documentation, _VERSIONED, pending)

    metric, documentation = "maskrcnn_engines_up", "Worker processes that accept batches."
    up = {key: batcher.engines_up for key, batcher in batchers.items()}
    yield _family(_Gauge, metric, documentation, ("model", "precision"), up)

    metric = "maskrcnn_engine_restarts"
    documentation = "Worker processes replaced since the model was loaded."
    restarts = {key: batcher.restarts for key, batcher in batchers.items()}
    yield _family(_Counter, metric, documentation, ("model", "precision"), restarts)

    metric, documentation = "maskrcnn_model_info", "Backend and device of the model; always 1."
    labels = ("model", "precision", "backend", "device")
    info = {(*key, b.info.backend, b.info.device): 1 for key, b in batchers.items()}
    yield _family(_Gauge, metric, documentation, labels, info)


def _slot_metrics(pipelines: Sequence[Pipeline]) -> Iterator[Metric]:
    wait = "Estimated queue time of a request that arrives now."
    for name, documentation, value in (
        ("slots", "Admission slots at the recent service rate.", attrgetter("capacity")),
        ("slots_in_use", "Admission slots in use.", attrgetter("in_use")),
        ("estimated_wait_seconds", wait, attrgetter("estimated_wait_s")),
    ):
        values = {(own.model.manifest.model_name,): value(own.admission) for own in pipelines}
        yield _family(_Gauge, f"maskrcnn_{name}", documentation, ("model",), values)


def _family(
    kind: type[_Untyped] | type[_Gauge] | type[_Counter],
    name: str,
    documentation: str,
    labels: Sequence[str],
    values: Mapping[Any, float],
) -> Metric:
    """Return a metric family. The keys of `values` are tuples of values of `labels`, in order."""
    family = kind(name, documentation, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


class LoopLag:
    """Measurement of the event loop's lag: the delay with which `asyncio.sleep` wakes a task."""

    def __init__(self) -> None:
        # Latest measurement, in seconds.
        self.last_s = 0.0
        # Maximum since the start of the previous window, in seconds.
        self.worst_s = 0.0

    async def run(self) -> None:
        """Measure the lag until cancelled. Warn after each 10 s window with any lag above 0.1 s."""
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


class GpuCollector(Collector):
    """Collector of NVML metrics of the GPUs visible to CUDA. Without GPUs it yields nothing."""

    # NVML is opened anew for each collection, so that the driver can be unloaded in between.

    def __init__(self) -> None:
        # First value of each GPU's energy counter in joules, by the GPU's UUID.
        self._first_energy: dict[str, float] = {}
        # Reads the first values in a thread, because an idle GPU may take seconds to respond.
        threading.Thread(target=self._read_gpus, name="gpu metrics", daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        gpus = self._read_gpus()
        for name, (documentation, _) in _GPU_VALUES.items():
            # The energy is one of Triton's counters, which are exported without a type; see
            # `ModelCollector`.
            kind = _Untyped if name == _ENERGY else _Gauge
            values = {(uuid,): own[name] for uuid, own in gpus.items() if name in own}
            if values:
                yield _family(kind, name, documentation, ("gpu_uuid",), values)

    @functools.cached_property
    def _bus_ids(self) -> list[str]:
        return gpu_bus_ids()

    def _read_gpus(self) -> dict[str, dict[str, float]]:
        """Return a dict from GPU UUID to the GPU's metrics, a dict from metric name to value."""
        gpus = {}
        with _skip_errors("no GPU"), _open_nvml():
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
    for name, (_, read) in _GPU_VALUES.items():
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

    `subject` is the value to be read, for the log. Many GPUs do not report all values.
    """
    try:
        yield
    except (pynvml.NVMLError, BackendError) as error:
        _log.debug("cannot read %s: %s", subject, error)

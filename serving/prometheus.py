"""The metrics of a server over HTTP, as Prometheus scrapes them."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from operator import attrgetter
from socketserver import ThreadingMixIn
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from .errors import ServingError
from .loop_lag import LoopLag
from .metrics import TRITON_REASONS
from .models import ServedModel
from .open_inference.responses import MODEL_VERSION
from .open_inference.statistics import Statistics
from .pipeline import Pipeline

_COUNTS: Final = {
    "request_success": ("Requests that were answered.", "inference_stats.success.count"),
    "count": ("Images that were answered.", "inference_count"),
    "exec_count": ("Batches that they were in.", "execution_count"),
}
_DURATIONS: Final = {
    "request": ("Time that requests took which were answered.", "success"),
    "queue": ("Time of these in which they waited for batches to start.", "queue"),
    "compute_input": ("Time of these in which images were prepared.", "compute_input"),
    "compute_infer": ("Time of these in which batches were computed.", "compute_infer"),
    "compute_output": ("Time of these in which detections were encoded.", "compute_output"),
}
"""Metrics of Triton, what they mean, and where they stand in ModelStatistics."""

_LABELS: Final = ("model", "version")
_TIMEOUT_S = 5.0
"""Longest wait for a word of a client."""
_POLL_S = 0.05
"""Between looks for whether to stop."""


class PipelineCollector(Collector):
    """What is read off a pipeline when it is asked for.

    What Triton counts has no type here: where there are types, one of Prometheus' two formats wants
    names of counters to end with `_total`, which Triton's do not.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """Speak for a pipeline."""
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        model = self._pipeline.model
        counted = self._pipeline.telemetry.metrics.statistics
        names = sorted({*model.names, *list(counted)})  # also those of models of the past
        statistics = {name: counted.get(name, Statistics()) for name in names}
        yield from _durations_and_counts(statistics)
        yield _failures(statistics)
        yield _pending(model)
        yield _engines(model)
        yield _info(model)


def _durations_and_counts(statistics: Mapping[str, Statistics]) -> Iterator[Metric]:
    messages = [own.message(name, MODEL_VERSION) for name, own in statistics.items()]
    for name, (documentation, path) in _COUNTS.items():
        family = UnknownMetricFamily(f"nv_inference_{name}", documentation, labels=_LABELS)
        for message in messages:
            family.add_metric((message.name, message.version), attrgetter(path)(message))
        yield family
    for name, (documentation, field) in _DURATIONS.items():
        name = f"nv_inference_{name}_duration_us"
        family = UnknownMetricFamily(name, documentation, labels=_LABELS)
        for message in messages:
            ns = getattr(message.inference_stats, field).ns
            family.add_metric((message.name, message.version), ns // 1000)
        yield family


def _failures(statistics: Mapping[str, Statistics]) -> Metric:
    name, documentation = "nv_inference_request_failure", "Requests that were not answered."
    family = UnknownMetricFamily(name, documentation, labels=(*_LABELS, "reason"))
    for name, own in statistics.items():
        for reason in TRITON_REASONS:
            family.add_metric((name, MODEL_VERSION, reason), own.failures.get(reason, 0))
    return family


def _pending(model: ServedModel) -> Metric:
    name, documentation = "nv_inference_pending_request_count", "Images that wait for a batch."
    family = GaugeMetricFamily(name, documentation, labels=_LABELS)
    waiting = sum(batcher.waiting for batcher in model.batchers.values())
    family.add_metric((model.manifest.model_name, MODEL_VERSION), waiting)
    return family


def _engines(model: ServedModel) -> Metric:
    name, documentation = "maskrcnn_engines_up", "Engines that take batches."
    family = GaugeMetricFamily(name, documentation, labels=("model", "precision"))
    for precision, batcher in model.batchers.items():
        family.add_metric((model.manifest.model_name, precision), batcher.engines_up)
    return family


def _info(model: ServedModel) -> Metric:
    labels = ("model", "precision", "backend", "device")
    family = GaugeMetricFamily("maskrcnn_model_info", "What computes; always 1.", labels=labels)
    for precision, batcher in model.batchers.items():
        values = (model.manifest.model_name, precision, batcher.info.backend, batcher.info.device)
        family.add_metric(values, 1)
    return family


def add_server_metrics(registry: CollectorRegistry, pipeline: Pipeline, lag: LoopLag) -> None:
    """Add to what is counted what can be read off a pipeline, an event loop and the process."""
    registry.register(PipelineCollector(pipeline))
    ProcessCollector(registry=registry)
    name, documentation = "maskrcnn_event_loop_lag", "Time by which the event loop was late, last."
    Gauge(f"{name}_seconds", documentation, registry=registry).set_function(lambda: lag.last_s)
    documentation = "The most of it in ten seconds or more."
    Gauge(f"{name}_worst_seconds", documentation, registry=registry).set_function(
        lambda: lag.worst_s
    )


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, *message: object) -> None:
        """Say nothing, where the class would write each request to standard error."""


@contextlib.contextmanager
def metrics_server(registry: CollectorRegistry, host: str, port: int) -> Iterator[str]:
    """Answer GET /metrics within the context.

    Args:
        registry: The metrics.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.

    Yields:
        The URL of the metrics.

    Raises:
        ServingError: the address cannot be listened on.
    """
    try:
        server = _listening_server(host.strip("[]"), port)
    except OSError as error:
        raise ServingError(
            f"cannot listen on {host}:{port} for metrics ({error.strerror}); "
            "choose another --metrics-port, or 0 for a free one"
        ) from None
    with server:
        server.set_app(make_wsgi_app(registry))
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics")
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def _listening_server(host: str, port: int) -> WSGIServer:
    (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)

    class Server(ThreadingMixIn, WSGIServer):
        address_family = family
        daemon_threads = True  # so that no client keeps the server from stopping

    return Server((host, port), _Handler)

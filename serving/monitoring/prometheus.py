"""The metrics of a server over HTTP, as Prometheus scrapes them."""

import contextlib
import io
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily as _Counter
from prometheus_client.core import GaugeMetricFamily as _Gauge
from prometheus_client.core import Metric
from prometheus_client.core import UnknownMetricFamily as _Untyped
from prometheus_client.registry import Collector

from ..config import address_of
from ..errors import ServingError
from ..models import ServedModel
from ..open_inference.responses import MODEL_VERSION
from ..pipeline import Pipeline
from .cpu_metrics import CpuCollector
from .gpu_metrics import GpuCollector
from .loop_lag import LoopLag
from .metrics import TRITON_REASONS
from .statistics import Statistics

_log = logging.getLogger(__name__)

_STATS: Final = "inference_stats"
_TRITON: Final = {
    "request_success": ("Requests that were answered.", f"{_STATS}.success.count"),
    "count": ("Images that were answered.", "inference_count"),
    "exec_count": ("Batches that they were in.", "execution_count"),
    "request_duration_us": ("Time that requests took which were answered.", f"{_STATS}.success.ns"),
    "queue_duration_us": ("Time of it waiting for threads and batches.", f"{_STATS}.queue.ns"),
    "compute_input_duration_us": ("Time of it preparing images.", f"{_STATS}.compute_input.ns"),
    "compute_infer_duration_us": ("Time of it computing batches.", f"{_STATS}.compute_infer.ns"),
    "compute_output_duration_us": ("Time of it making answers.", f"{_STATS}.compute_output.ns"),
}
"""Metrics of Triton, what they mean, and where ModelStatistics has them."""

_VERSIONED: Final = ("model", "version")
_REQUEST_S = 5.0
"""For a client to ask and to take the answer."""
_MOST_CONNECTIONS = 32
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
        counted = self._pipeline.telemetry.metrics.statistics
        names = {*self._pipeline.model.names, *list(counted)}  # also of models of the past
        yield from _triton_metrics({name: counted.get(name, Statistics()) for name in names})
        yield from _model_metrics(self._pipeline.model)


def _triton_metrics(statistics: Mapping[str, Statistics]) -> Iterator[Metric]:
    messages = {name: own.message(name, MODEL_VERSION) for name, own in statistics.items()}
    for metric, (documentation, path) in _TRITON.items():
        value = attrgetter(path)
        unit = 1000 if path.endswith(".ns") else 1
        values = {(name, MODEL_VERSION): value(own) // unit for name, own in messages.items()}
        yield _family(_Untyped, f"nv_inference_{metric}", documentation, _VERSIONED, values)
    failures = {
        (name, MODEL_VERSION, reason): own.failures.get(reason, 0)
        for name, own in statistics.items()
        for reason in TRITON_REASONS
    }
    metric, documentation = "nv_inference_request_failure", "Requests that were not answered."
    yield _family(_Untyped, metric, documentation, (*_VERSIONED, "reason"), failures)


def _model_metrics(model: ServedModel) -> Iterator[Metric]:
    name, batchers = model.manifest.model_name, model.batchers
    metric, documentation = "nv_inference_pending_request_count", "Images that wait for a batch."
    waiting = sum((batcher.waiting for batcher in batchers.values()), Counter())
    pending = {(asked, MODEL_VERSION): waiting[asked] for asked in model.names}
    yield _family(_Gauge, metric, documentation, _VERSIONED, pending)

    metric, documentation = "maskrcnn_engines_up", "Engines that take batches."
    up = {(name, precision): batcher.engines_up for precision, batcher in batchers.items()}
    yield _family(_Gauge, metric, documentation, ("model", "precision"), up)

    metric, documentation = "maskrcnn_engine_restarts", "Engines replaced since the model's load."
    restarts = {(name, precision): batcher.restarts for precision, batcher in batchers.items()}
    yield _family(_Counter, metric, documentation, ("model", "precision"), restarts)

    metric, documentation = "maskrcnn_model_info", "What computes; always 1."
    labels = ("model", "precision", "backend", "device")
    info = {(name, p, b.info.backend, b.info.device): 1 for p, b in batchers.items()}
    yield _family(_Gauge, metric, documentation, labels, info)


def _family(
    kind: type[_Untyped] | type[_Gauge] | type[_Counter],
    name: str,
    documentation: str,
    labels: Sequence[str],
    values: Mapping[Any, float],
) -> Metric:
    """A metric of these values, whose keys are those of the labels."""
    family = kind(name, documentation, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def add_server_metrics(registry: CollectorRegistry, pipeline: Pipeline, lag: LoopLag) -> None:
    """Add to what is counted what can be read off pipeline, event loop, process and machine."""
    for collector in (PipelineCollector(pipeline), CpuCollector(), GpuCollector()):
        registry.register(collector)
    ProcessCollector(registry=registry)
    for name, documentation, value in (
        ("lag", "Time by which the event loop woke too late, last.", lambda: lag.last_s),
        ("lag_worst", "The most of it in ten seconds or a little more.", lambda: lag.worst_s),
    ):
        name = f"maskrcnn_event_loop_{name}_seconds"
        Gauge(name, documentation, registry=registry).set_function(value)


class _FaultLog(io.StringIO):
    """What is written where an answer cannot be made, which is the traceback."""

    def flush(self) -> None:
        """Log what was written."""
        _log.error("the metrics cannot be told\n%s", self.getvalue())


class _Handler(WSGIRequestHandler):
    def log_message(self, *message: object) -> None:
        """Say nothing, where the class would write each request to standard error."""

    def get_stderr(self) -> io.StringIO:
        """Where faults of the server's own go."""
        return _FaultLog()


class _Server(ThreadingMixIn, WSGIServer):
    """Ends connections that take too long, and the oldest where there are too many.

    What clients do wrong is said nowhere, where the class would write a traceback.
    """

    daemon_threads = True  # so that no client keeps the server from stopping
    request_queue_size = 128  # others wait a second and more before they try again

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._began: dict[Any, float] = {}
        """By connection, the oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._began) >= _MOST_CONNECTIONS:
                self._end_oldest()
            self._began[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        latest = time.monotonic() - _REQUEST_S
        with self._lock:
            for _ in range(sum(began < latest for began in self._began.values())):
                self._end_oldest()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # not while it is ended
            self._began.pop(request, None)
            super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            while self._began:
                self._end_oldest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of the metrics broke off", exc_info=True)

    def _end_oldest(self) -> None:
        connection = next(iter(self._began))
        del self._began[connection]
        with contextlib.suppress(OSError):  # where the client is gone
            connection.shutdown(socket.SHUT_RDWR)  # which its thread notices, and closes it


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
        server = _listening_server(host, port)
    except OSError as error:
        raise ServingError(
            f"cannot listen on {address_of(host, port)} for metrics ({error.strerror}); "
            "choose another --metrics-port, or 0 for a free one"
        ) from None
    with server:
        server.set_app(make_wsgi_app(registry))
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics")
        thread.start()
        try:
            yield f"http://{address_of(host, server.server_port)}/metrics"
        finally:
            server.shutdown()
            thread.join()


def _listening_server(host: str, port: int) -> _Server:
    (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return _Server(family, (host, port))

"""Prometheus endpoint: HTTP server of all metrics, and model metrics under Triton's names."""

import contextlib
import io
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily as _Counter
from prometheus_client.core import GaugeMetricFamily as _Gauge
from prometheus_client.core import Metric
from prometheus_client.core import UnknownMetricFamily as _Untyped
from prometheus_client.registry import Collector

from .config import address_of
from .errors import ServingError
from .monitoring.logs import accept_failures
from .monitoring.machine_metrics import (
    ConnectionCollector,
    CpuCollector,
    GpuCollector,
    LoopLag,
    metric_family,
)
from .monitoring.metrics import TRITON_REASONS, ModelStatistics
from .pipeline.pipeline import ModelRepository, Pipeline
from .pipeline.served_model import ServedModel
from .rpc.listener import bind_address

_log = logging.getLogger(__name__)

_STATS: Final = "inference_stats"
# Triton's metrics, by name without the prefix nv_inference_: help text, and path of the value in
# the ModelStatistics message.
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

# Time limit for a client to send its request and receive the response, in seconds.
_REQUEST_S = 5.0
_MAX_CONNECTIONS = 32
# Interval in seconds at which the server checks for expired connections and for its shutdown.
_POLL_S = 0.05


class ModelCollector(Collector):
    """Collector of the request statistics, state and admission slots of all models."""

    # OpenMetrics requires that the names of counters end in `_total`. The names of Triton's
    # counters do not, so these are exported without a type.

    def __init__(self, models: ModelRepository) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of all models."""
        counted = self._models.resources.telemetry.metrics.statistics
        models = [pipeline.model for pipeline in self._models.pipelines]
        served = {(name, model.version) for model in models for name in model.names}
        # A reload can change names and versions, so some counted ones may not be served any more.
        statistics = {key: counted.get(key, ModelStatistics()) for key in {*served, *list(counted)}}
        yield from _triton_metrics(statistics)
        yield from _model_metrics(models)
        yield from _slot_metrics(self._models.pipelines)


def _triton_metrics(statistics: Mapping[tuple[str, str], ModelStatistics]) -> Iterator[Metric]:
    messages = {key: own.message(*key) for key, own in statistics.items()}
    for metric, (documentation, path) in _TRITON.items():
        value = attrgetter(path)
        unit = 1000 if path.endswith(".ns") else 1
        values = {key: value(own) // unit for key, own in messages.items()}
        yield metric_family(_Untyped, f"nv_inference_{metric}", documentation, _VERSIONED, values)
    failures = {
        (*key, reason): own.failures.get(reason, 0)
        for key, own in statistics.items()
        for reason in TRITON_REASONS
    }
    metric, documentation = "nv_inference_request_failure", "Failed requests."
    yield metric_family(_Untyped, metric, documentation, (*_VERSIONED, "reason"), failures)


def _model_metrics(models: Sequence[ServedModel]) -> Iterator[Metric]:
    batchers = {
        (model.manifest.model_name, precision): batcher
        for model in models
        for precision, batcher in model.batchers.items()
    }
    metric, documentation = "nv_inference_pending_request_count", "Images waiting for a batch."
    waiting = sum((batcher.waiting for batcher in batchers.values()), Counter())
    pending = {(name, model.version): waiting[name] for model in models for name in model.names}
    yield metric_family(_Gauge, metric, documentation, _VERSIONED, pending)

    metric, documentation = "maskrcnn_engines_up", "Worker processes that accept batches."
    up = {key: batcher.engines_up for key, batcher in batchers.items()}
    yield metric_family(_Gauge, metric, documentation, ("model", "precision"), up)

    metric = "maskrcnn_engine_restarts"
    documentation = "Worker processes replaced since the model was loaded."
    restarts = {key: batcher.restarts for key, batcher in batchers.items()}
    yield metric_family(_Counter, metric, documentation, ("model", "precision"), restarts)

    metric, documentation = "maskrcnn_model_info", "Backend and device of the model; always 1."
    labels = ("model", "precision", "backend", "device")
    info = {(*key, b.info.backend, b.info.device): 1 for key, b in batchers.items()}
    yield metric_family(_Gauge, metric, documentation, labels, info)


def _slot_metrics(pipelines: Sequence[Pipeline]) -> Iterator[Metric]:
    wait = "Estimated queue time of a request that arrives now."
    for name, documentation, value in (
        (
            "slots",
            "Admission slots. A low recent service rate reduces them.",
            attrgetter("capacity"),
        ),
        ("slots_in_use", "Admission slots in use.", attrgetter("in_use")),
        ("estimated_wait_seconds", wait, attrgetter("estimated_wait_s")),
    ):
        values = {(own.model.manifest.model_name,): value(own.admission) for own in pipelines}
        yield metric_family(_Gauge, f"maskrcnn_{name}", documentation, ("model",), values)


def add_server_metrics(
    registry: CollectorRegistry, models: ModelRepository, lag: LoopLag, cpu: CpuCollector
) -> None:
    """Register metrics of models, connections, decode memory, event loop, process, CPU and GPUs."""
    own = (ModelCollector(models), ConnectionCollector(), cpu, GpuCollector())
    for collector in own:
        registry.register(collector)
    ProcessCollector(registry=registry)
    worst = "Maximum lag of the event loop in the last 10 to 20 seconds."
    memory, threads = models.resources.decode_memory, models.resources.threads
    decoding = "Memory reserved for decoding images, plus a fixed amount per busy thread."
    for name, documentation, value in (
        (
            "decode_memory_bytes",
            decoding,
            lambda: memory.reserved + threads.busy * memory.small,
        ),
        ("decode_memory_limit_bytes", "Limit of decode memory.", lambda: memory.limit),
        ("event_loop_lag_seconds", "Latest lag of the event loop.", lambda: lag.last_s),
        ("event_loop_lag_worst_seconds", worst, lambda: lag.worst_s),
    ):
        Gauge(f"maskrcnn_{name}", documentation, registry=registry).set_function(value)


def add_certificate_metric(registry: CollectorRegistry, days_left: Callable[[], float]) -> None:
    """Add the time until the TLS certificate expires, in days, to a registry."""
    documentation = "Days until the TLS certificate in use expires; negative after that."
    gauge = Gauge("maskrcnn_certificate_days_left", documentation, registry=registry)
    gauge.set_function(days_left)


class _ErrorLog(io.StringIO):
    """Stream to which wsgiref writes the traceback of a failed request."""

    def flush(self) -> None:
        """Log, as an error, the text that wsgiref has written to this stream."""
        _log.error("cannot collect the metrics\n%s", self.getvalue())


class _Handler(WSGIRequestHandler):
    def log_message(self, *message: object) -> None:
        """Do nothing. The base class would write each request to standard error."""

    def get_stderr(self) -> io.StringIO:
        """Return the stream to which wsgiref writes the traceback of a failed request."""
        return _ErrorLog()


class _WsgiServer(ThreadingMixIn, WSGIServer):
    """HTTP server that closes each connection 5 s after accepting it.

    If 32 connections are open and a new one is accepted, the oldest is closed.
    """

    daemon_threads = True  # so that a client cannot delay the shutdown
    request_queue_size = 128  # if this queue is full, clients retry after a second or more

    def __init__(self, family: socket.AddressFamily, address: Any) -> None:
        self.address_family = family
        # Start time of each connection, the oldest first.
        self._started: dict[Any, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # The method of the base class would look up the name of the host, possibly by DNS.
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if accept_failures.report(error):
                # The connection stays queued, so without a pause the server would try to accept it
                # again immediately.
                time.sleep(_POLL_S)
            raise  # the base class ignores this error

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._started) >= _MAX_CONNECTIONS:
                self._end_oldest()
            self._started[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        latest = time.monotonic() - _REQUEST_S
        with self._lock:
            for _ in range(sum(start < latest for start in self._started.values())):
                self._end_oldest()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # so that `_end_oldest` does not use the connection at the same time
            self._started.pop(request, None)
            super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            while self._started:
                self._end_oldest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The base class would write a traceback to standard error.
        _log.debug("a metrics client closed its connection early", exc_info=True)

    def _end_oldest(self) -> None:
        connection = next(iter(self._started))
        del self._started[connection]
        with contextlib.suppress(OSError):  # the client may have disconnected
            # The connection's thread then reads the end of the stream, and closes the connection.
            connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def metrics_server(registry: CollectorRegistry, host: str, port: int) -> Iterator[str]:
    """Serve the metrics of a registry at /metrics within the `with` block.

    Args:
        registry: Registry of the metrics.
        host: Address to listen on.
        port: Port to listen on. 0: a free port.

    Yields:
        URL of the metrics.

    Raises:
        ServingError: the server cannot listen on the address.
    """
    try:
        server = _WsgiServer(*bind_address(host, port))
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

"""Telemetry of requests and images: metrics, log records, and OpenTelemetry trace spans."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import grpc

from ..detections import Timing
from ..errors import ModelNotFoundError, ServingError
from ..grpc_status import CallContext, status_from_error
from .logs import AccessLog, extend_request_id
from .metrics import Metrics

# Status codes that count as server errors in OpenTelemetry's semantic conventions.
_SERVER_ERRORS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)

# Context managers of calls and images that are not traced. They hold no state, so that all share
# them.
_NO_SPAN: Final = nullcontext()
_NO_IMAGE_SPAN: Final[AbstractContextManager[Callable[[Timing], None]]] = nullcontext(
    lambda timing: None
)


class Telemetry:
    """Recorder of requests: updates metrics and logs requests. Holds the tracer of the server."""

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        """Create a recorder with new, empty metrics. If `tracer` is None, record no traces."""
        self.metrics = Metrics()
        self.tracer = tracer or Tracer()
        self._access_log = AccessLog()

    def request(
        self,
        name: str,
        served: Collection[str],
        version: str,
        message_id: str,
        peer: str,
        size: int,
    ) -> AbstractContextManager[list[Timing]]:
        """Count and log the request that the current task processes within the `with` block.

        Use one task per request, because the request ID for log lines is stored per task.

        Args:
            name: Model name in the request.
            served: Names of the model that processes the request. If `name` is not among them, the
                request is recorded under the first of them. A request that fails with
                ModelNotFoundError is recorded under no model.
            version: Version of this model.
            message_id: ID that the client chose for the request. Empty: the request has no ID.
            peer: Client address, as `context.peer()` returns it.
            size: Size of the request in bytes.

        Returns:
            Context manager that yields an empty list, to which the caller appends the timing of
            each image.
        """
        extend_request_id(message_id)
        name = name if name in served else next(iter(served))
        return _Recording(self.metrics, self._access_log, name, version, peer, size)

    def reject_call(self, method: str, peer: str, error: ServingError) -> None:
        """Count and log a rejected call, without counting it as a failed request of a model."""
        self.metrics.count_rejected_call(error)
        self._access_log.log_rejected_call(method, peer, error)

    def reject_request(
        self, model: str, version: str, method: str, peer: str, error: ServingError
    ) -> None:
        """Count and log a failed request for `model` that was rejected before it was read."""
        self.metrics.count_failure(model, version, error, elapsed_s=0)
        self._access_log.log_rejected_call(method, peer, error)


class _Recording(AbstractContextManager[list[Timing]]):
    """Context manager of `Telemetry.request`."""

    # A generator with the decorator `contextmanager` would take longer.

    def __init__(
        self, metrics: Metrics, log: AccessLog, name: str, version: str, peer: str, size: int
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._name = name
        self._version = version
        self._peer = peer
        self._size = size
        self._timings: list[Timing] = []
        self._start = time.monotonic()

    def __enter__(self) -> list[Timing]:
        self._metrics.requests_in_progress += 1
        return self._timings

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        metrics, name, elapsed_s = self._metrics, self._name, time.monotonic() - self._start
        metrics.requests_in_progress -= 1
        logged_name: str | None = name
        if failure is None:
            metrics.statistics[name, self._version].count_success(self._timings, elapsed_s)
        elif isinstance(failure, ModelNotFoundError):
            logged_name = None
            metrics.count_rejected_call(failure)
        else:
            metrics.count_failure(name, self._version, failure, elapsed_s)
        self._log.log_request(
            logged_name,
            self._peer,
            failure,
            size=self._size,
            timings=self._timings,
            elapsed_s=elapsed_s,
        )


class Tracer:
    """Interface of tracers. This base class records nothing."""

    def call(self, method: str, context: CallContext) -> AbstractContextManager[None]:
        """Trace the gRPC call that is handled within the `with` block.

        Args:
            method: Full method name, as `/package.Service/Method`.
            context: gRPC context of the call.
        """
        return _NO_SPAN

    def http_request(
        self, method: str, route: str, context: CallContext
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Trace the HTTP request that is handled within the `with` block.

        Args:
            method: HTTP method.
            route: Template of the path, such as `/v2/models/{model}/infer`.
            context: Context of the request, with methods of a gRPC context.

        Yields:
            Function to be called with the HTTP status code of the response.
        """
        return nullcontext(lambda status: None)

    def image(self) -> AbstractContextManager[Callable[[Timing], None]]:
        """Trace the image that is processed within the `with` block.

        Yields:
            Function to be called with the image's timing once the image is processed.
        """
        return _NO_IMAGE_SPAN

    def close(self) -> None:
        """Export the remaining spans."""


def load_tracer(tracing: bool) -> Tracer:
    """Return an OpenTelemetry tracer if `tracing` is true, else a tracer that records nothing.

    Raises:
        ServingError: OpenTelemetry is not installed, or rejects an environment variable.
    """
    if not tracing:
        return Tracer()
    try:
        return OpenTelemetryTracer()
    except ModuleNotFoundError as error:
        raise ServingError(
            f"tracing needs {error.name}, which is not installed; "
            'install it with pip install "maskrcnn-trt[tracing]"'
        ) from None
    except Exception as error:  # of several types, some of which are OpenTelemetry's own
        raise ServingError(
            f"OpenTelemetry cannot be set up: {error}; check the environment variables OTEL_..."
        ) from error


class OpenTelemetryTracer(Tracer):
    """Tracer that exports a span per gRPC call and per HTTP request.

    A span has a child span per image, which has a child span per stage: decode, queue, infer and
    encode. Spans continue the trace in the client's metadata (W3C `traceparent`). OpenTelemetry's
    `OTEL_...` environment variables configure the exporter.
    """

    def __init__(self) -> None:
        # OpenTelemetry is imported only here, because it is an optional dependency.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(__name__)
        self._extract = extract
        self._server_kind = SpanKind.SERVER
        self._error_status = partial(Status, StatusCode.ERROR)

    @contextmanager
    def call(self, method: str, context: CallContext) -> Iterator[None]:
        """Record a span of the gRPC call, with the attributes of OpenTelemetry's conventions."""
        service, _, name = method.removeprefix("/").rpartition("/")
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
            "network.peer.address": context.peer(),
        }
        with self._server_span(f"{service}/{name}", context, attributes) as span:
            try:
                yield
            except asyncio.CancelledError:
                self._set_status(span, grpc.StatusCode.CANCELLED)
                raise
            except Exception:
                code = context.code() or grpc.StatusCode.UNKNOWN
                self._set_status(span, code, context.details())
                raise
            self._set_status(span, grpc.StatusCode.OK)

    @contextmanager
    def http_request(
        self, method: str, route: str, context: CallContext
    ) -> Iterator[Callable[[int], None]]:
        """Record a span of the HTTP request, with the attributes of OpenTelemetry's conventions."""
        attributes = {
            "http.request.method": method,
            "http.route": route,
            "network.peer.address": context.peer(),
        }
        with self._server_span(f"{method} {route}", context, attributes) as span:

            def record(status: int) -> None:
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(self._error_status(context.details()))

            yield record

    def _server_span(
        self, name: str, context: CallContext, attributes: dict[str, str]
    ) -> AbstractContextManager[Any]:
        """Return a context manager for a span that continues the trace in the client's metadata."""
        return self._tracer.start_as_current_span(
            name,
            self._extract(dict(context.invocation_metadata() or ())),
            self._server_kind,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        )

    @contextmanager
    def image(self) -> Iterator[Callable[[Timing], None]]:
        """Record a span of the image, and yield a function that adds a child span per stage."""
        with self._tracer.start_as_current_span("detect", set_status_on_exception=False) as span:
            try:
                yield partial(self._add_stages, span)
            except Exception as error:
                if status_from_error(error) in _SERVER_ERRORS:  # not if the image is invalid
                    span.set_status(self._error_status(str(error)))
                raise

    def close(self) -> None:
        """Export the remaining spans. With opentelemetry-sdk 1.45, this takes at most 30 s."""
        self._provider.shutdown()

    def _add_stages(self, span: Any, timing: Timing) -> None:
        span.set_attribute("maskrcnn.batch_size", timing.batch_size)
        stages = {
            "decode": timing.decode_us,
            "queue": timing.queue_us,
            "infer": timing.infer_us,
            "encode": timing.encode_us,
        }
        # The stages follow each other without gaps, and the last one ends now.
        start = time.time_ns() - 1000 * sum(stages.values())
        for name, us in stages.items():
            stage = self._tracer.start_span(name, start_time=start)
            start += 1000 * us
            stage.end(start)

    def _set_status(self, span: Any, code: grpc.StatusCode, details: str = "") -> None:
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code in _SERVER_ERRORS:
            span.set_status(self._error_status(details))


def _resource() -> Any:
    """Return the OpenTelemetry resource of this process; its default service name is `maskrcnn`."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: "maskrcnn"}))
    return resource

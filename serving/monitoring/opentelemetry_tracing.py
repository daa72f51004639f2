"""Traces for OpenTelemetry, which its variables `OTEL_...` of the environment configure.

Module of the extra `tracing`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from ..detections import Timing
from .tracing import Context, Tracer

_SERVER_FAULTS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""What OpenTelemetry's conventions count as errors of a server."""


class OpenTelemetryTracer(Tracer):
    """A span a call, in it one an image, and in that one a stage.

    They go on with the trace that the client's metadata name (W3C's `traceparent`).
    """

    def __init__(self) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(__name__)

    @contextmanager
    def call(self, method: str, context: Context) -> Iterator[None]:
        """Make a span of what the conventions for gRPC say."""
        service, _, name = method.removeprefix("/").rpartition("/")
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
            "network.peer.address": context.peer(),
        }
        with self._tracer.start_as_current_span(
            f"{service}/{name}",
            extract(dict(context.invocation_metadata() or ())),
            SpanKind.SERVER,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except asyncio.CancelledError:
                _set_status(span, grpc.StatusCode.CANCELLED)
                raise
            except Exception:
                _set_status(span, context.code() or grpc.StatusCode.UNKNOWN, context.details())
                raise
            _set_status(span, grpc.StatusCode.OK)

    @contextmanager
    def image(self) -> Iterator[Callable[[Timing], None]]:
        """Make a span, and when there is a timing one a stage."""
        with self._tracer.start_as_current_span("detect") as span:
            yield partial(self._add_stages, span)

    def close(self) -> None:
        """Send what is left, for as long as `OTEL_BSP_EXPORT_TIMEOUT` says."""
        self._provider.shutdown()

    def _add_stages(self, span: Span, timing: Timing) -> None:
        span.set_attribute("maskrcnn.batch_size", timing.batch_size)
        stages = {
            "decode": timing.decode_us,
            "queue": timing.queue_us,
            "infer": timing.infer_us,
            "encode": timing.encode_us,
        }
        # They follow each other, and the last has just ended.
        start = time.time_ns() - 1000 * sum(stages.values())
        for name, us in stages.items():
            stage = self._tracer.start_span(name, start_time=start)
            start += 1000 * us
            stage.end(start)


def _resource() -> Resource:
    """What the environment says of this service, which has a name in any case."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: "maskrcnn"}))
    return resource


def _set_status(span: Span, code: grpc.StatusCode, details: str = "") -> None:
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code in _SERVER_FAULTS:
        span.set_status(Status(StatusCode.ERROR, details))

"""Where spans go: nowhere, unless the server is to trace."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc

from ..detections import Timing
from ..errors import ServingError

Context = grpc.aio.ServicerContext[Any, Any]


class Tracer:
    """Makes no spans."""

    def call(self, method: str, context: Context) -> AbstractContextManager[None]:
        """Trace a call within the context.

        Args:
            method: What is called, as `/package.Service/Method`.
            context: That of the call, which has its metadata and, at the end, its status.
        """
        return nullcontext()

    def image(self) -> AbstractContextManager[Callable[[Timing], None]]:
        """Trace the way of an image within the context, which gets what takes its timing."""
        return nullcontext(_ignore)

    def close(self) -> None:
        """Send what is left."""


def _ignore(timing: Timing) -> None:
    pass


def load_tracer(tracing: bool) -> Tracer:
    """What traces, if that is asked for.

    Raises:
        ServingError: OpenTelemetry is not installed.
    """
    if not tracing:
        return Tracer()
    try:
        from .opentelemetry_tracing import OpenTelemetryTracer
    except ModuleNotFoundError as error:
        raise ServingError(
            f"tracing needs {error.name}, which is not installed; "
            'install it with pip install "maskrcnn-trt[tracing]"'
        ) from None
    return OpenTelemetryTracer()

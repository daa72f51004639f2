"""Telemetry of requests and images: metrics, log records and trace spans."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from ..detections import Timing
from ..grpc_status import status_from_error
from .logs import name_request
from .metrics import Metrics
from .tracing import Tracer

_log = logging.getLogger(__name__)


class Telemetry:
    """Recorder of requests and images: updates metrics, logs requests, and traces images."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """Create the metrics. If `tracer` is None, record no traces."""
        self.metrics = Metrics()
        self.tracer = tracer or Tracer()

    @contextmanager
    def request(
        self, name: str, served: Collection[str], message_id: str, peer: str
    ) -> Iterator[list[Timing]]:
        """Record the request that the current task processes within the context.

        Use one task per request, because the log ID is stored per task.

        Args:
            name: Model name in the request.
            served: Served model names. If `name` is not among them, the first is recorded.
            message_id: ID of the request, chosen by the client. Empty: none.
            peer: Client address, as `context.peer()` returns it.

        Yields:
            Empty list. The caller appends the timing of each image.
        """
        name = name if name in served else next(iter(served))
        name_request(message_id)
        timings: list[Timing] = []
        failure: BaseException | None = None
        start = time.monotonic()
        try:
            with self.metrics.in_progress.track_inprogress():
                yield timings
        except BaseException as error:
            failure = error
            self.metrics.count_failure(name, error, time.monotonic() - start)
            raise
        else:
            self.metrics.statistics[name].count_success(timings, time.monotonic() - start)
        finally:
            # At level DEBUG, because a server processes hundreds of requests per second.
            if _log.isEnabledFor(logging.DEBUG):
                _log_request(name, peer, timings, failure, time.monotonic() - start)

    @contextmanager
    def image(self, model: str, precision: str) -> Iterator[Callable[[Timing], None]]:
        """Record the image that is processed within the context.

        Args:
            model: Name of the model.
            precision: Precision of the model.

        Yields:
            Function to be called with the image's timing once the image is processed.
        """
        start = time.monotonic()
        with self.tracer.image() as add_stages:

            def record(timing: Timing) -> None:
                self.metrics.count_image(model, precision, timing, time.monotonic() - start)
                add_stages(timing)

            yield record


def _log_request(
    name: str,
    peer: str,
    timings: Sequence[Timing],
    failure: BaseException | None,
    elapsed_s: float,
) -> None:
    if failure is None:
        status = "OK"
    elif isinstance(failure, Exception):
        status = status_from_error(failure).name
    else:
        status = "CANCELLED"
    fields: dict[str, object] = {
        "model": name,
        "peer": peer,
        "status": status,
        "duration_ms": round(1000 * elapsed_s, 3),
        "timings": [vars(timing) for timing in timings],
    }
    _log.debug(
        "request for %s from %s: %s in %.1f ms", name, peer, status, 1000 * elapsed_s, extra=fields
    )

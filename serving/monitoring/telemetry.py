"""Telemetry of requests and images: metrics, log records and trace spans."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ..detections import Timing
from ..errors import ServingError
from .access_log import AccessLog
from .logs import name_request
from .metrics import Metrics
from .tracing import Tracer


class Telemetry:
    """Recorder of requests and images: updates metrics, logs requests, and traces images."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """Create the metrics. If `tracer` is None, record no traces."""
        self.metrics = Metrics()
        self.tracer = tracer or Tracer()
        self._access_log = AccessLog()

    @contextmanager
    def request(
        self, name: str, served: Collection[str], message_id: str, peer: str, size: int
    ) -> Iterator[list[Timing]]:
        """Count and log the request that the current task processes within the `with` block.

        Use one task per request, because the request ID for log lines is stored per task.

        Args:
            name: Model name in the request.
            served: Served model names. If `name` is not among them, the request is recorded under
                the first of them.
            message_id: ID that the client chose for the request. Empty: the request has no ID.
            peer: Client address, as `context.peer()` returns it.
            size: Size of the request in bytes.

        Yields:
            Empty list, to which the caller appends the timing of each image.
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
            self._access_log.log_request(
                name,
                peer,
                failure,
                size=size,
                timings=timings,
                elapsed_s=time.monotonic() - start,
            )

    def reject_call(self, method: str, peer: str, error: ServingError) -> None:
        """Count and log a call that was rejected before its request was read."""
        self.metrics.count_rejected_call(error)
        self._access_log.log_rejected_call(method, peer, error)

    def reject_request(self, model: str, method: str, peer: str, error: ServingError) -> None:
        """Count and log a request for `model` that was rejected before it was read."""
        self.metrics.count_failure(model, error, elapsed_s=0)
        self._access_log.log_rejected_call(method, peer, error)

    @contextmanager
    def image(self, model: str, precision: str) -> Iterator[Callable[[Timing], None]]:
        """Record metrics and a trace span of the image that is processed within the `with` block.

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

"""What is to be known of requests afterwards: counts, times, lines of the log, spans."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..detections import Timing
from ..models import ServedModel
from ..statuses import status_from_error
from .logs import name_request
from .metrics import Metrics
from .tracing import Tracer

_log = logging.getLogger(__name__)


class Telemetry:
    """Watches the requests of a server."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """Watch, and trace where there is a tracer."""
        self.metrics = Metrics()
        self.tracer = tracer or Tracer()

    @contextmanager
    def request(
        self, model: ServedModel, name: str, message_id: str, peer: str
    ) -> Iterator[list[Timing]]:
        """Watch a request within the context, which it has a task for.

        Args:
            model: What serves it.
            name: The name by which it asks for the model; an unknown one counts as the model's own.
            message_id: What the client calls it.
            peer: The connection that it came by.

        Yields:
            An empty list, for the timings of the images that it asked for.
        """
        name = name if name in model.names else model.manifest.model_name
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
            self.metrics.count_answer(name, timings, time.monotonic() - start)
        finally:
            # At DEBUG, as servers answer hundreds of requests a second.
            if _log.isEnabledFor(logging.DEBUG):
                _log_request(name, peer, timings, failure, time.monotonic() - start)

    @contextmanager
    def image(self, model: str, precision: str) -> Iterator[Callable[[Timing], None]]:
        """Watch an image that goes through a model within the context.

        Args:
            model: Name of the model.
            precision: What it computes in.

        Yields:
            What takes the timing when there are detections.
        """
        start = time.monotonic()
        with self.tracer.image() as add_stages:

            def answered(timing: Timing) -> None:
                self.metrics.count_image(model, precision, timing, time.monotonic() - start)
                add_stages(timing)

            yield answered


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
    _log.debug("%s by %s: %s in %.1f ms", name, peer, status, 1000 * elapsed_s, extra=fields)

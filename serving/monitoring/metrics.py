"""What became of requests, as Prometheus scrapes it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ...model.images import ImageError
from ..detections import Timing
from ..errors import (
    BackendDownError,
    ExpiredError,
    ForbiddenError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    ServingError,
    StoppingError,
    UnauthenticatedError,
    UnloadedError,
)
from .statistics import Statistics

_SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)

TRITON_REASONS: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Why a request got no answer, as Triton has it."""


class Reason(NamedTuple):
    """Why a request got no answer."""

    name: str
    """What we call it."""
    triton: str
    """One of `TRITON_REASONS`."""


_REASONS: Final[Mapping[type[BaseException], Reason]] = {
    QueueFullError: Reason("queue_full", "REJECTED"),
    ExpiredError: Reason("expired", "REJECTED"),
    StoppingError: Reason("stopping", "REJECTED"),
    UnloadedError: Reason("unloaded", "REJECTED"),
    # Raised by asyncio when a client gives its request up, goes, or has waited its time.
    BaseException: Reason("cancelled", "CANCELED"),
    BackendDownError: Reason("backend_down", "BACKEND"),
    Exception: Reason("failed", "BACKEND"),
    ImageError: Reason("invalid", "OTHER"),
    InvalidRequestError: Reason("invalid", "OTHER"),
    ModelNotFoundError: Reason("not_found", "OTHER"),
    UnauthenticatedError: Reason("unauthenticated", "OTHER"),
    ForbiddenError: Reason("forbidden", "OTHER"),
}


def reason_from_error(error: BaseException) -> Reason:
    """Why a request got no answer that raised."""
    return next(_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS)


class _Image(NamedTuple):
    """Histograms of the images of one model in one precision."""

    decode: Histogram
    queue: Histogram
    infer: Histogram
    encode: Histogram
    request: Histogram
    batch_size: Histogram


class Metrics:
    """Counts requests, to be read by other threads meanwhile."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        """What is counted here, and what else a server adds."""
        self.statistics: defaultdict[str, Statistics] = defaultdict(Statistics)
        """What became of requests, by the name of the model that they asked for."""
        self.in_progress = Gauge(
            "maskrcnn_requests_in_progress",
            "Requests that are not answered yet.",
            registry=self.registry,
        )
        self._rejected = Counter(
            "maskrcnn_rejected",
            "Requests that got no detections, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self._reloads = Counter(
            "maskrcnn_reloads", "Bundles loaded anew.", ("result",), registry=self.registry
        )
        # Zeros, so that a first one is seen to come.
        for reason in _REASONS.values():
            self._rejected.labels(reason.name)
        for result in ("success", "failure"):
            self._reloads.labels(result)
        self._histograms = _image_histograms(self.registry)
        self._children: dict[tuple[str, str], _Image] = {}

    def count_image(self, model: str, precision: str, timing: Timing, elapsed_s: float) -> None:
        """Count an image that was detected in.

        Args:
            model: Name of the model.
            precision: What it computed in.
            timing: Where the time went.
            elapsed_s: Seconds from the image's arrival to its detections.
        """
        key = (model, precision)
        if key not in self._children:
            self._children[key] = _Image(*(h.labels(*key) for h in self._histograms))
        histograms = self._children[key]
        histograms.decode.observe(timing.decode_us / 1e6)
        histograms.queue.observe(timing.queue_us / 1e6)
        histograms.infer.observe(timing.infer_us / 1e6)
        histograms.encode.observe(timing.encode_us / 1e6)
        histograms.request.observe(elapsed_s)
        histograms.batch_size.observe(timing.batch_size)

    def count_answer(self, name: str, timings: Sequence[Timing], elapsed_s: float) -> None:
        """Count a request for a model of that name; further as `Statistics.count_success`."""
        self.statistics[name].count_success(timings, elapsed_s)

    def count_failure(self, name: str, error: BaseException, elapsed_s: float) -> None:
        """Count a request for a model of that name that raised, after so many seconds."""
        reason = reason_from_error(error)
        self.statistics[name].count_failure(elapsed_s, reason.triton)
        self._rejected.labels(reason.name).inc()

    def count_refusal(self, error: ServingError) -> None:
        """Count a call that was refused before it was a request for a model."""
        self._rejected.labels(reason_from_error(error).name).inc()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Count the loading of a bundle within the context."""
        result = "failure"
        try:
            yield
            result = "success"
        finally:
            self._reloads.labels(result).inc()


def _image_histograms(registry: CollectorRegistry) -> _Image:
    histogram = partial(Histogram, labelnames=("model", "precision"), registry=registry)
    seconds = partial(histogram, buckets=_SECONDS)
    return _Image(
        decode=seconds("maskrcnn_decode_seconds", "Time to decode, resize and pad an image."),
        queue=seconds(
            "maskrcnn_queue_seconds", "Time that an image waited for threads and a batch."
        ),
        infer=seconds("maskrcnn_infer_seconds", "Time of the batch that an image was in."),
        encode=seconds("maskrcnn_encode_seconds", "Time to scale boxes and encode masks."),
        request=seconds(
            "maskrcnn_request_seconds", "Time from the arrival of an image to its detections."
        ),
        batch_size=histogram(
            "maskrcnn_batch_size",
            "Images of the batch that an image was in.",
            buckets=_BATCH_SIZES,
        ),
    )

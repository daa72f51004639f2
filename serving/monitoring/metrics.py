"""Prometheus metrics of requests, and Triton-compatible request statistics for each model name."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, Final, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram, Metric

from ...model.image_limits import ImageError
from ...protos.inference import open_inference_pb2 as pb
from ..detections import Timing
from ..errors import (
    BackendDownError,
    ExpiredError,
    ForbiddenError,
    InvalidRequestError,
    ModelNotFoundError,
    PrecisionNotFoundError,
    QueueFullError,
    RateLimitError,
    ServingError,
    StoppingError,
    UnauthenticatedError,
    UnloadedError,
)

_SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
# Maximum number of images that `Metrics` remembers before it adds them to the histograms.
_MAX_UNOBSERVED: Final = 64
_STAGES: Final = ("queue", "compute_input", "compute_infer", "compute_output")

# Values of the label `reason` of Triton's metric nv_inference_request_failure.
TRITON_REASONS: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")

# Microseconds per stage, in the order of `_STAGES`, and function that returns them for a `Timing`.
_Durations = list[int]
_durations_of: Final = attrgetter("queue_us", "decode_us", "infer_us", "encode_us")


class Reason(NamedTuple):
    """Failure reason of a request: values of the label `reason` in two Prometheus metrics.

    `name`: value in maskrcnn_rejected_total. `triton`: value in nv_inference_request_failure.
    """

    # For our metric maskrcnn_rejected_total.
    name: str
    # For Triton's metric: one of `TRITON_REASONS`.
    triton: str


_REASONS: Final[Mapping[type[BaseException], Reason]] = {
    QueueFullError: Reason("queue_full", "REJECTED"),
    RateLimitError: Reason("rate_limited", "REJECTED"),
    ExpiredError: Reason("expired", "REJECTED"),
    StoppingError: Reason("stopping", "REJECTED"),
    UnloadedError: Reason("unloaded", "REJECTED"),
    # In practice asyncio.CancelledError: the client cancelled the call or disconnected, or the
    # call's deadline passed.
    BaseException: Reason("cancelled", "CANCELED"),
    BackendDownError: Reason("backend_down", "BACKEND"),
    Exception: Reason("failed", "BACKEND"),
    ImageError: Reason("invalid", "OTHER"),
    InvalidRequestError: Reason("invalid", "OTHER"),
    ModelNotFoundError: Reason("not_found", "OTHER"),
    PrecisionNotFoundError: Reason("not_found", "OTHER"),
    UnauthenticatedError: Reason("unauthenticated", "OTHER"),
    ForbiddenError: Reason("forbidden", "OTHER"),
}


def reason_from_error(error: BaseException) -> Reason:
    """Return the metric labels (`Reason`) for the exception with which a request failed."""
    return next(_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS)


class ModelStatistics:
    """Thread-safe counters of the requests for one model name, as in Triton's ModelStatistics.

    The durations of a request are those of its slowest image. Each image counts as 1/B of a batch
    of B images, so that a batch shared by several requests counts once.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests = 0
        self._images = 0
        self._failures: Counter[str] = Counter()
        self._last_ms = 0
        self._success_us = self._fail_us = 0
        self._durations = _no_durations()
        # Number of images by the size of their batch.
        self._batches: Counter[int] = Counter()
        self._batch_durations: defaultdict[int, _Durations] = defaultdict(_no_durations)

    def count_success(self, timings: Sequence[Timing], elapsed_s: float) -> None:
        """Count a successful request.

        Args:
            timings: Timing of each image.
            elapsed_s: Seconds from the request's arrival to its response.
        """
        by_image = list(map(_durations_of, timings))
        with self._lock:
            self._requests += 1
            self._images += len(timings)
            self._last_ms = time.time_ns() // 1_000_000
            self._success_us += round(elapsed_s * 1e6)
            _add(self._durations, max(by_image, key=sum))
            for timing, durations in zip(timings, by_image, strict=True):
                size = timing.batch_size
                self._batches[size] += 1
                _add(self._batch_durations[size], durations)

    def count_failure(self, elapsed_s: float, reason: str) -> None:
        """Count a request that failed after `elapsed_s` s. `reason`: one of `TRITON_REASONS`."""
        with self._lock:
            self._failures[reason] += 1
            self._fail_us += round(elapsed_s * 1e6)

    @property
    def failures(self) -> Mapping[str, int]:
        """Number of failed requests by reason (one of `TRITON_REASONS`)."""
        with self._lock:
            return dict(self._failures)

    def message(self, name: str, version: str) -> pb.ModelStatistics:
        """Return the statistics as a protobuf message with the given model name and version."""
        with self._lock:
            executions = sum(images / size for size, images in self._batches.items())
            stages = {
                stage: _duration(self._requests, us)
                for stage, us in zip(_STAGES, self._durations, strict=True)
            }
            return pb.ModelStatistics(
                name=name,
                version=version,
                last_inference=self._last_ms,
                inference_count=self._images,
                execution_count=round(executions),
                inference_stats=pb.InferStatistics(
                    success=_duration(self._requests, self._success_us),
                    fail=_duration(self._failures.total(), self._fail_us),
                    **stages,
                ),
                batch_stats=[self._batch_message(size) for size in sorted(self._batches)],
            )

    def _batch_message(self, size: int) -> pb.InferBatchStatistics:
        images, durations = self._batches[size], self._batch_durations[size]
        # `durations` contains the duration of a batch once per image of the batch.
        mean = {name: round(us / size) for name, us in zip(_STAGES, durations, strict=True)}
        executions = round(images / size)
        return pb.InferBatchStatistics(
            batch_size=size, **{name: _duration(executions, mean[name]) for name in _STAGES[1:]}
        )


def _no_durations() -> _Durations:
    return [0] * len(_STAGES)


def _add(totals: _Durations, durations: Sequence[int]) -> None:
    for stage, us in enumerate(durations):
        totals[stage] += us


def _duration(count: int, us: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=1000 * us)


class _ImageHistograms(NamedTuple):
    """Histograms of processing times and batch sizes, for one model in one precision."""

    decode: Histogram
    queue: Histogram
    infer: Histogram
    encode: Histogram
    request: Histogram
    batch_size: Histogram


class _CountedImage(NamedTuple):
    """Image whose durations are not in the histograms yet."""

    model: str
    precision: str
    timing: Timing
    elapsed_s: float


class _Registry(CollectorRegistry):
    """Registry that calls a function before its metrics are collected."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before

    def collect(self) -> Iterable[Metric]:
        self._before()
        return super().collect()

    def restricted_registry(self, names: Iterable[str]) -> Any:
        self._before()
        return super().restricted_registry(names)


class Metrics:
    """Counters and histograms of requests and images. Any thread may read them at any time."""

    def __init__(self) -> None:
        # Registry of these metrics. A server adds further collectors to it.
        self.registry: CollectorRegistry = _Registry(self._observe_images)
        # Statistics by model name in the request, and version of the model.
        self.statistics: defaultdict[tuple[str, str], ModelStatistics] = defaultdict(
            ModelStatistics
        )
        # Number of requests that have been read and are not answered yet.
        self.requests_in_progress = 0
        name, documentation = "maskrcnn_requests_in_progress", "Requests in progress."
        in_progress = Gauge(name, documentation, registry=self.registry)
        in_progress.set_function(lambda: self.requests_in_progress)
        counter = partial(prometheus_client.Counter, registry=self.registry)
        self._rejected = counter("maskrcnn_rejected", "Failed requests by reason.", ("reason",))
        self._reloads = counter("maskrcnn_reloads", "Bundle reloads by result.", ("result",))
        # Zeros are exported from the start, so that Prometheus sees the first increase.
        for reason in _REASONS.values():
            self._rejected.labels(reason.name)
        for result in ("success", "failure"):
            self._reloads.labels(result)
        self._histograms = _image_histograms(self.registry)
        # Histograms by model and precision, which are the values of their labels.
        self._children: dict[tuple[str, str], _ImageHistograms] = {}
        # Observing many images at once takes a fraction of the time that it takes between other
        # work, when its code and data are no longer in the CPU's caches.
        self._unobserved = deque[_CountedImage]()

    def count_image(self, model: str, precision: str, timing: Timing, elapsed_s: float) -> None:
        """Count an image that was processed successfully.

        Args:
            model: Name of the model.
            precision: Precision of the model.
            timing: Durations of the image's stages.
            elapsed_s: Seconds from the image's arrival to its detections.
        """
        self._unobserved.append(_CountedImage(model, precision, timing, elapsed_s))
        if len(self._unobserved) >= _MAX_UNOBSERVED:
            self._observe_images()

    def _observe_images(self) -> None:
        """Move the images that `count_image` has queued into the histograms."""
        with suppress(IndexError):  # raised when the deque, which another thread may use, is empty
            while True:
                self._observe(self._unobserved.popleft())

    def _observe(self, image: _CountedImage) -> None:
        key, timing = (image.model, image.precision), image.timing
        if key not in self._children:
            self._children[key] = _ImageHistograms(*(h.labels(*key) for h in self._histograms))
        histograms = self._children[key]
        histograms.decode.observe(timing.decode_us / 1e6)
        histograms.queue.observe(timing.queue_us / 1e6)
        histograms.infer.observe(timing.infer_us / 1e6)
        histograms.encode.observe(timing.encode_us / 1e6)
        histograms.request.observe(image.elapsed_s)
        histograms.batch_size.observe(timing.batch_size)

    def count_failure(
        self, name: str, version: str, error: BaseException, elapsed_s: float
    ) -> None:
        """Count a request for the model `name` as failed with `error` after `elapsed_s` seconds."""
        reason = reason_from_error(error)
        self.statistics[name, version].count_failure(elapsed_s, reason.triton)
        self._rejected.labels(reason.name).inc()

    def count_rejected_call(self, error: ServingError) -> None:
        """Count a rejected call, without counting it as a failed request of a model."""
        self._rejected.labels(reason_from_error(error).name).inc()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Count one bundle reload: as a failure if the `with` block raises, else as a success."""
        result = "failure"
        try:
            yield
            result = "success"
        finally:
            self._reloads.labels(result).inc()


def _image_histograms(registry: CollectorRegistry) -> _ImageHistograms:
    histogram = partial(Histogram, labelnames=("model", "precision"), registry=registry)
    seconds = partial(histogram, buckets=_SECONDS)
    return _ImageHistograms(
        decode=seconds("maskrcnn_decode_seconds", "Time to decode, resize and pad an image."),
        queue=seconds("maskrcnn_queue_seconds", "Time of an image in queues."),
        infer=seconds("maskrcnn_infer_seconds", "Time of the image's batch in the model."),
        encode=seconds("maskrcnn_encode_seconds", "Time to scale boxes and encode masks."),
        request=seconds(
            "maskrcnn_request_seconds", "Time from the arrival of an image to its detections."
        ),
        batch_size=histogram(
            "maskrcnn_batch_size", "Number of images in the image's batch.", buckets=_BATCH_SIZES
        ),
    )

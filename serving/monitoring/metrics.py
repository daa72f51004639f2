"""Prometheus metrics of requests, and Triton-compatible request statistics for each model name."""

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from operator import attrgetter
from threading import Lock
from typing import Final, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

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
# Labels of the histograms, and their names, help texts and largest values of the buckets.
_LABELS: Final = ("model", "precision")
_HISTOGRAMS: Final = (
    ("maskrcnn_decode_seconds", "Time to decode, resize and pad an image.", _SECONDS),
    ("maskrcnn_queue_seconds", "Time of an image in queues.", _SECONDS),
    ("maskrcnn_infer_seconds", "Time of the image's batch in the model.", _SECONDS),
    ("maskrcnn_encode_seconds", "Time to scale boxes and encode masks.", _SECONDS),
    (
        "maskrcnn_request_seconds",
        "Time from the arrival of an image to its detections.",
        _SECONDS,
    ),
    ("maskrcnn_batch_size", "Number of images in the image's batch.", _BATCH_SIZES),
)
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


class _Histogram:
    """Observations of one value, counted by bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Create an empty histogram. `bounds` are the largest values of the buckets, ascending."""
        self.bounds = (*bounds, INF)
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0
        self._created = time.time()

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the samples of this histogram to a metric family, as prometheus_client does."""
        names = map(floatToGoString, self.bounds)
        buckets = list(zip(names, accumulate(self.counts), strict=True))
        family.add_metric(labels, buckets, self.sum)
        if prometheus_client.metrics._use_created:
            values = dict(zip(_LABELS, labels, strict=True))
            family.add_sample(f"{family.name}_created", values, self._created)


class _ImageHistograms(Collector):
    """Histograms of processing times and batch sizes, by model and precision.

    Call `observe` from one thread only. Any thread may collect the metrics at any time.
    """

    # These histograms take a third of the time of prometheus_client's, which acquire two locks per
    # observation.

    def __init__(self) -> None:
        # By model and precision: the histograms of `_HISTOGRAMS`.
        self._histograms: dict[tuple[str, str], list[_Histogram]] = {}

    def observe(self, model: str, precision: str, values: Sequence[float]) -> None:
        """Count the values of one image, in the order of `_HISTOGRAMS`."""
        histograms = self._histograms.get((model, precision))
        if histograms is None:
            histograms = [_Histogram(bounds) for _, _, bounds in _HISTOGRAMS]
            self._histograms[model, precision] = histograms
        for histogram, value in zip(histograms, values, strict=True):
            histogram.counts[bisect_left(histogram.bounds, value)] += 1
            histogram.sum += value

    def collect(self) -> Iterator[Metric]:
        """Yield the current histograms."""
        children = list(self._histograms.items())
        for index, (name, documentation, _) in enumerate(_HISTOGRAMS):
            family = HistogramMetricFamily(name, documentation, labels=_LABELS)
            for labels, histograms in children:
                histograms[index].add_to(family, labels)
            yield family

    # The registry reads the names of the metrics, by which clients can select them, from this.
    describe = collect


class Metrics:
    """Counters and histograms of requests and images. Any thread may read them at any time."""

    def __init__(self) -> None:
        # Registry of these metrics. A server adds further collectors to it.
        self.registry = CollectorRegistry()
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
        self._images = _ImageHistograms()
        self.registry.register(self._images)

    def count_image(self, model: str, precision: str, timing: Timing, elapsed_s: float) -> None:
        """Count an image that was processed successfully.

        Args:
            model: Name of the model.
            precision: Precision of the model.
            timing: Durations of the image's stages.
            elapsed_s: Seconds from the image's arrival to its detections.
        """
        values = (
            timing.decode_us / 1e6,
            timing.queue_us / 1e6,
            timing.infer_us / 1e6,
            timing.encode_us / 1e6,
            elapsed_s,
            timing.batch_size,
        )
        self._images.observe(model, precision, values)

    def count_failure(
        self, name: str, version: str, error: BaseException, elapsed_s: float
    ) -> None:
        """Count a request for a model that failed with `error` after `elapsed_s` s."""
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

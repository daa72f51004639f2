"""Measurement of bulk prediction, from image files in memory to detections with RLE masks."""

import contextlib
import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...model.bundle.manifest import Manifest, Precision, read_manifest
from ...model.bundle.spec import ShapeBucket
from ...model.image_limits import ImageError
from ...serving.backends.base import Backend
from ...serving.backends.loading import load_backend, served_precision
from ...serving.config import BackendName
from ...serving.detections import DEFAULT_OPTIONS
from ...serving.engines.base import MODEL_STEP, ImageRequest, Outcome, Step
from ...serving.engines.host_steps import plan_image
from ...serving.offline import batch_steps, detect_many
from ..common.images import photo_like_jpegs
from ..common.timing import measure_call_rate, measure_durations

# Number of untimed batches before the throughput is measured.
_WARMUP_BATCHES = 10
# Minimum number of timed batches, even if they take longer than `BulkSettings.seconds`.
_MIN_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class BulkSettings:
    """Settings of the bulk benchmark: precision, backend, batch sizes, images and duration."""

    # Precision to measure. None: the precision that `served_precision` selects.
    precision: Precision | None = None
    backend: BackendName = "auto"
    # Batch sizes, measured one after the other.
    batches: Sequence[int] = (8,)
    # Encoded images, used in rotation. Empty: use the images of `photo_like_jpegs` that fit an
    # input size.
    images: Sequence[bytes] = ()
    # Duration of each measurement.
    seconds: float = 5.0


@dataclass(frozen=True)
class BulkResult:
    """Throughput and time per step of bulk prediction with a bundle, at one batch size."""

    # Name of the backend.
    engine: str
    precision: Precision
    device: str
    # Images per batch. All images are resized and padded to the same input size.
    batch: int
    # Throughput from files to masks, with all steps running concurrently.
    images_per_second: float
    # Throughput of the model step alone.
    engine_images_per_second: float
    # Median time of a batch in each step, while no other step runs.
    step_milliseconds: dict[str, float]
    # Mean over all images. Each detection has a mask.
    detections_per_image: float

    @property
    def share(self) -> float:
        """Throughput from files to masks divided by the throughput of the model step alone."""
        return self.images_per_second / self.engine_images_per_second


def measure_bulk(bundle: Path, settings: BulkSettings) -> list[BulkResult]:
    """Measure bulk prediction with a bundle: throughput, and time of each processing step.

    Returns:
        One result per batch size.

    Raises:
        BundleError: the bundle cannot be read or lacks the precision.
        BackendError: the backend does not run on this machine, or does not support one of the
            batch sizes.
        ImageError: an image is invalid.
    """
    manifest = read_manifest(bundle)
    precision = settings.precision or served_precision(manifest, settings.backend)
    max_batch = max(settings.batches)
    backend = load_backend(bundle, manifest, precision, settings.backend, max_batch)
    results = []
    with contextlib.closing(backend):
        backend.warm_up(max_batch)
        images = settings.images or _fitting_images(photo_like_jpegs(), backend, manifest)
        for batch in settings.batches:
            requests = _request_batch(images, backend, manifest, batch)
            engine_rate, steps = _measure_steps(backend, manifest, requests, settings.seconds)
            rate, detections = _measure_pipeline(backend, manifest, images, batch, settings.seconds)
            results.append(
                BulkResult(
                    engine=backend.name,
                    precision=precision,
                    device=backend.device,
                    batch=batch,
                    images_per_second=rate,
                    engine_images_per_second=engine_rate,
                    step_milliseconds=steps,
                    detections_per_image=detections,
                )
            )
    return results


def _fitting_images(
    images: Sequence[bytes], backend: Backend, manifest: Manifest
) -> Sequence[bytes]:
    """Return the images that, after resizing, fit into one of the backend's input sizes.

    If no image fits, return all of them.
    """
    fitting = []
    for data in images:
        with contextlib.suppress(ImageError):
            plan_image(data, manifest.preprocessing, backend.buckets)
            fitting.append(data)
    # If none fits, return all, so that the measurement raises the first image's error.
    return fitting or images


def _request_batch(
    images: Sequence[bytes], backend: Backend, manifest: Manifest, batch: int
) -> list[ImageRequest]:
    """Return `batch` requests that all have the same input size.

    Choose the input size that the largest number of `images` need. If fewer than `batch` images
    need this size, repeat these images.
    """
    by_bucket: dict[ShapeBucket, list[ImageRequest]] = defaultdict(list)
    for data in images:
        image = plan_image(data, manifest.preprocessing, backend.buckets)
        by_bucket[image.bucket].append(ImageRequest(image, DEFAULT_OPTIONS))
    requests = max(by_bucket.values(), key=len)
    return list(itertools.islice(itertools.cycle(requests), batch))


def _measure_steps(
    backend: Backend, manifest: Manifest, requests: Sequence[ImageRequest], seconds: float
) -> tuple[float, dict[str, float]]:
    """Measure each processing step of one batch while no other step runs.

    Each step is measured for an equal share of `seconds`. The throughput of the model step is also
    measured, for another `seconds`, with batches queued back to back.

    Returns:
        Images per second of the model step, and a mapping from the name of each step to its median
        milliseconds per batch.
    """
    work = batch_steps(backend, manifest, threads=1)
    milliseconds: dict[str, float] = {}
    engine_rate = 0.0
    value: Any = requests
    for step in work.steps:

        def run_to_end(step: Step = step, value: Any = value) -> None:
            step.run(value)
            work.synchronize()

        run_to_end()  # warm-up
        durations = measure_durations(run_to_end, seconds / len(work.steps), _MIN_CALLS)
        milliseconds[step.name] = 1000 * median(durations)
        if step.name == MODEL_STEP:
            enqueue = functools.partial(step.run, value)
            # Measure for as long as `_measure_pipeline`, because a warm GPU lowers its clock.
            calls = max(len(durations), math.ceil(seconds / median(durations)))
            rate = measure_call_rate(enqueue, work.synchronize, calls)
            engine_rate = rate * len(requests)
        value = step.run(value)
    return engine_rate, milliseconds


def _measure_pipeline(
    backend: Backend, manifest: Manifest, images: Sequence[bytes], batch: int, seconds: float
) -> tuple[float, float]:
    """Run bulk prediction for `seconds`, with all processing steps running concurrently.

    Returns:
        Images per second, and mean detections per image.
    """
    endless = itertools.cycle(images)
    with contextlib.closing(detect_many(endless, backend, manifest, max_batch=batch)) as outcomes:
        for _ in range(_WARMUP_BATCHES):
            _count_detections(itertools.islice(outcomes, batch))
        detections: list[int] = []
        begin = time.perf_counter()
        while len(detections) < _MIN_CALLS or time.perf_counter() < begin + seconds:
            detections.append(_count_detections(itertools.islice(outcomes, batch)))
        rate = batch * len(detections) / (time.perf_counter() - begin)
    return rate, sum(detections) / batch / len(detections)


def _count_detections(outcomes: Iterable[Outcome]) -> int:
    """Return the total number of detections, or raise the `ImageError` of an invalid image."""
    count = 0
    for outcome in outcomes:
        if isinstance(outcome, ImageError):
            raise outcome
        count += len(outcome)
    return count

"""Speed in bulk: from image files in memory to detections with run-length encoded masks."""

import contextlib
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..model.images import ImageError
from ..model.manifest import Manifest, Precision, read_manifest
from ..model.spec import MAX_PIXELS, ShapeBucket
from ..serving.backends.base import Backend
from ..serving.backends.loading import load_backend, served_precision
from ..serving.config import BackendName
from ..serving.detections import DEFAULT_OPTIONS
from ..serving.offline.bulk import batch_steps, detect_many
from ..serving.steps.base import MODEL_STEP, Job, Outcome, Step
from ..serving.steps.preprocessing import PlannedImage, plan_image
from .bulk_images import photo_like_jpegs
from .timing import calls_per_second, durations_of

_WARMUP_BATCHES = 10
_LEAST_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class BulkSettings:
    """How a bundle is measured."""

    precision: Precision | None = None
    """None, the backend's first in the bundle."""
    backend: BackendName = "auto"
    batches: Sequence[int] = (8,)
    """Images a batch."""
    images: Sequence[bytes] = ()
    """Encoded images, taken over and over; none, `photo_like_jpegs`, as far as they fit."""
    seconds: float = 5.0
    """Length of each measurement."""


@dataclass(frozen=True)
class BulkResult:
    """A bundle at one batch size."""

    engine: str
    precision: Precision
    device: str
    batch: int
    """Images a batch, of one input size."""
    images_per_second: float
    """From files to masks, all steps at work at once."""
    engine_images_per_second: float
    """Of the step that computes the model, alone."""
    step_milliseconds: dict[str, float]
    """Of a batch by step, one after the other, each waited for: medians."""
    detections_per_image: float
    """Mean, each of which has a mask."""

    @property
    def share(self) -> float:
        """What is reached of the engine's own rate."""
        return self.images_per_second / self.engine_images_per_second


def measure_bulk(bundle: Path, settings: BulkSettings) -> list[BulkResult]:
    """Measure a bundle at each batch size.

    Raises:
        BundleError: the bundle cannot be read or lacks the precision.
        BackendError: the backend does not run here, or not with such batches.
        ImageError: an image cannot be used.
    """
    manifest = read_manifest(bundle)
    precision = settings.precision or served_precision(manifest, settings.backend)
    max_batch = max(settings.batches)
    backend = load_backend(bundle, manifest, precision, settings.backend, max_batch)
    results = []
    with contextlib.closing(backend):
        backend.warm_up(max_batch)
        images = settings.images or _fitting(photo_like_jpegs(), backend, manifest)
        for batch in settings.batches:
            engine_rate, milliseconds = _measure_steps(
                backend,
                manifest,
                _planned_batch(images, backend, manifest, batch),
                settings.seconds,
            )
            rate, detections = _measure_all(backend, manifest, images, batch, settings.seconds)
            results.append(
                BulkResult(
                    engine=backend.name,
                    precision=precision,
                    device=backend.device,
                    batch=batch,
                    images_per_second=rate,
                    engine_images_per_second=engine_rate,
                    step_milliseconds=milliseconds,
                    detections_per_image=detections,
                )
            )
    return results


def _fitting(images: Sequence[bytes], backend: Backend, manifest: Manifest) -> Sequence[bytes]:
    """Those that one of the input sizes holds; all, if none does, to be refused one by one."""
    fitting = []
    for data in images:
        with contextlib.suppress(ImageError):
            _planned(data, backend, manifest)
            fitting.append(data)
    return fitting or images


def _planned(data: bytes, backend: Backend, manifest: Manifest) -> PlannedImage:
    return plan_image(
        data,
        manifest.preprocessing,
        backend.buckets,
        max_pixels=MAX_PIXELS,
        apply_orientation=True,
    )


def _planned_batch(
    images: Sequence[bytes], backend: Backend, manifest: Manifest, batch: int
) -> list[Job]:
    """Jobs of the input size that most of them have, over and over if need be."""
    by_bucket: dict[ShapeBucket, list[Job]] = defaultdict(list)
    for data in images:
        image = _planned(data, backend, manifest)
        by_bucket[image.bucket].append(Job(image, DEFAULT_OPTIONS))
    most = max(by_bucket.values(), key=len)
    return list(itertools.islice(itertools.cycle(most), batch))


def _measure_steps(
    backend: Backend, manifest: Manifest, jobs: Sequence[Job], seconds: float
) -> tuple[float, dict[str, float]]:
    """Images a second of the model alone, and milliseconds of a batch in each step."""
    work = batch_steps(backend, manifest, threads=1)
    milliseconds: dict[str, float] = {}
    engine_rate = 0.0
    value: Any = jobs
    for step in work.steps:

        def complete(step: Step = step, value: Any = value) -> None:
            step.run(value)
            work.synchronize()

        complete()
        durations = durations_of(complete, seconds / len(work.steps), _LEAST_CALLS)
        milliseconds[step.name] = 1000 * median(durations)
        if step.name == MODEL_STEP:
            queue = functools.partial(step.run, value)
            rate = calls_per_second(queue, work.synchronize, len(durations))
            engine_rate = rate * len(jobs)
        value = step.run(value)
    return engine_rate, milliseconds


def _measure_all(
    backend: Backend, manifest: Manifest, images: Sequence[bytes], batch: int, seconds: float
) -> tuple[float, float]:
    """Images a second through all steps at once, and detections an image."""
    endless = itertools.cycle(images)
    with contextlib.closing(detect_many(endless, backend, manifest, max_batch=batch)) as outcomes:
        for _ in range(_WARMUP_BATCHES):
            _detections_among(itertools.islice(outcomes, batch))
        detections: list[int] = []
        begin = time.perf_counter()
        while len(detections) < _LEAST_CALLS or time.perf_counter() < begin + seconds:
            detections.append(_detections_among(itertools.islice(outcomes, batch)))
        rate = batch * len(detections) / (time.perf_counter() - begin)
    return rate, sum(detections) / batch / len(detections)


def _detections_among(outcomes: Iterable[Outcome]) -> int:
    """How many there are.

    Raises:
        ImageError: an image cannot be used.
    """
    count = 0
    for outcome in outcomes:
        if isinstance(outcome, ImageError):
            raise outcome
        count += len(outcome)
    return count

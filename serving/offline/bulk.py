"""Detection in many images: batches of one input size, several of them in progress at once."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...model.images import ImageError
from ...model.manifest import Manifest
from ...model.spec import MAX_PIXELS, ShapeBucket
from ..backends.base import Backend
from ..detections import DEFAULT_OPTIONS, DetectionOptions
from ..errors import image_error_from_os_error
from ..steps.base import BatchSteps, Job, Outcome, Source, Step
from ..steps.host_steps import HostSteps
from ..steps.preprocessing import plan_image

CORES: Final = len(os.sched_getaffinity(0))
"""Those that this process may use."""

_BATCHES_AHEAD = 8
"""Batches of images that are read before the oldest must have been answered: one for each step,
and room for images of a rare input size to become a full batch."""


def detect_many(
    images: Iterable[bytes | Path],
    backend: Backend,
    manifest: Manifest,
    options: DetectionOptions = DEFAULT_OPTIONS,
    *,
    max_batch: int = 8,
    max_pixels: int = MAX_PIXELS,
    apply_orientation: bool = True,
    threads: int = CORES,
) -> Generator[Outcome, None, None]:
    """Detect in encoded images, of which a bounded number is read ahead.

    While a batch is decoded, others are at the model or becoming masks: where the backend is
    torch's on its device, else in threads of the CPU.

    Args:
        images: Contents of JPEG, PNG or WebP files, or their paths. They are taken and read in the
            thread that asks for results.
        backend: Loaded for batches of `max_batch`.
        manifest: Of the bundle that the backend was loaded from.
        options: Which detections to keep, and the form of their masks.
        max_batch: Images of one input size that the model gets at once.
        max_pixels: Larger images are refused.
        apply_orientation: Turn images upright as their EXIF says.
        threads: Batches that are decoded at once, and as many that are encoded.

    Returns:
        In the order of the images what was found, or why an image cannot be read or used. To
        close it before its end stops the work.
    """

    def planned(source: bytes | Path) -> Source:
        try:
            image = plan_image(
                _contents_of(source),
                manifest.preprocessing,
                backend.buckets,
                max_pixels=max_pixels,
                apply_orientation=apply_orientation,
            )
        except ImageError as error:
            return error
        return Job(image, options)

    work = batch_steps(backend, manifest, threads=threads)
    return outcomes_of(map(planned, images), work, max_batch)


def _contents_of(source: bytes | Path) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise image_error_from_os_error(error) from None


def outcomes_of(
    sources: Iterable[Source], work: BatchSteps, max_batch: int
) -> Generator[Outcome, None, None]:
    """Bring images through steps, in batches of one input size.

    Args:
        sources: They are taken in the thread that asks for results.
        work: The steps.
        max_batch: Images of a batch, at most.

    Yields:
        In the order of the images what was found, or why an image cannot be used.
    """
    with _Pipeline(work) as pipeline:
        queue = _BatchQueue(pipeline, max_batch)
        for source in sources:
            queue.put(source)
            while queue.is_due:
                yield queue.get()
        queue.flush()
        while queue:
            yield queue.get()


def batch_steps(backend: Backend, manifest: Manifest, *, threads: int) -> BatchSteps:
    """The fastest way from images to detections that a backend allows."""
    if backend.name == "torch":
        from ..backends.torch import TorchBackend
        from ..steps.device_steps import DeviceSteps

        assert isinstance(backend, TorchBackend)
        return DeviceSteps(backend, manifest, threads=threads)
    return HostSteps(backend, manifest, threads=threads)


class _Pipeline:
    """Threads for each step, through which batches go in their order."""

    def __init__(self, work: BatchSteps) -> None:
        self._work = work
        self._executors = [
            ThreadPoolExecutor(step.threads, thread_name_prefix=step.name) for step in work.steps
        ]

    def __enter__(self) -> "_Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in self._executors:
            executor.shutdown()
        self._work.synchronize()

    def submit(self, jobs: Sequence[Job]) -> Future[list[Outcome]]:
        """Take a batch of one input size; its future holds an outcome for each image."""
        batch: Future[Any] = Future()
        batch.set_result(jobs)
        for step, executor in zip(self._work.steps, self._executors, strict=True):
            batch = executor.submit(_run_after, batch, step)
        return batch


def _run_after(before: Future[Any], step: Step) -> Any:
    return step.run(before.result())


@dataclass(eq=False)
class _Batch:
    """Jobs of one input size, and once they are at work what is going to become of them."""

    jobs: list[Job] = field(default_factory=list)
    outcomes: Future[list[Outcome]] | None = None


class _Place(NamedTuple):
    """Where the outcome of an image is going to be."""

    batch: _Batch
    row: int


class _BatchQueue:
    """Images in the order in which they came, gathered into batches by input size."""

    def __init__(self, pipeline: _Pipeline, max_batch: int) -> None:
        self._pipeline = pipeline
        self._max_batch = max_batch
        self._waiting: deque[_Place | ImageError] = deque()
        self._gathering: dict[ShapeBucket, _Batch] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, source: Source) -> None:
        """Take an image; a batch that is full with it starts."""
        if isinstance(source, ImageError):
            self._waiting.append(source)
            return
        batch = self._gathering.setdefault(source.bucket, _Batch())
        self._waiting.append(_Place(batch, len(batch.jobs)))
        batch.jobs.append(source)
        if len(batch.jobs) == self._max_batch:
            self._start(source.bucket)

    def flush(self) -> None:
        """Start all batches as they are."""
        for bucket in tuple(self._gathering):
            self._start(bucket)

    @property
    def is_due(self) -> bool:
        """Whether the oldest image's outcome is there, or must be waited for before more come."""
        if len(self._waiting) > _BATCHES_AHEAD * self._max_batch:
            return True
        if not self._waiting or isinstance(self._waiting[0], ImageError):
            return bool(self._waiting)
        outcomes = self._waiting[0].batch.outcomes
        return outcomes is not None and outcomes.done()

    def get(self) -> Outcome:
        """Outcome of the oldest image; its batch starts now if it has not yet."""
        place = self._waiting.popleft()
        if isinstance(place, ImageError):
            return place
        if place.batch.outcomes is None:
            self._start(place.batch.jobs[0].bucket)
        assert place.batch.outcomes is not None
        return place.batch.outcomes.result()[place.row]

    def _start(self, bucket: ShapeBucket) -> None:
        batch = self._gathering.pop(bucket)
        batch.outcomes = self._pipeline.submit(batch.jobs)
        batch.jobs = []

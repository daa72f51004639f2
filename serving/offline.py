"""Detection without a server: `Detector`, and batched processing with bounded read-ahead."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import tee
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from ..model.bundle.manifest import Manifest, Precision, read_manifest
from ..model.bundle.spec import MAX_PIXELS, ShapeBucket
from ..model.image_files import ImageSource, check_images, read_image_source
from ..model.image_limits import ImageError, check_size, image_error_from_os_error
from .backends.base import Backend, DeviceBackend
from .backends.loading import load_backend, served_precision
from .config import BackendName
from .detections import (
    DEFAULT_OPTIONS,
    DetectionOptions,
    Detections,
    check_count,
    check_options,
)
from .engines.base import (
    BatchEntry,
    BatchSteps,
    ImageRequest,
    Outcome,
    SourceImage,
    StepChain,
)
from .engines.host_steps import HostSteps, plan_image
from .errors import BackendError, DeferredErrors

# Maximum read-ahead in batches. If more images than fit into this many batches are queued,
# `run_in_batches` waits for the oldest one. The limit exceeds the number of batches in flight on a
# GPU, so that images of a rare input size can fill a batch.
_BATCHES_AHEAD = 8


class Detector:
    """Detector that runs a bundle (exported model) in this process, without a server.

    Its results equal those of the server.

    `Detector(bundle)(images)` returns the detections of several images. In a `with` statement, the
    model is released at the end of the block.
    """

    def __init__(
        self,
        bundle: str | Path,
        precision: Precision | None = None,
        backend: BackendName = "auto",
        max_batch: int = 8,
    ) -> None:
        """Load a bundle (exported model).

        Args:
            bundle: Folder of the bundle.
            precision: Precision of inference. None: the first one that the bundle has for the
                backend.
            backend: Inference backend. `auto`: the first one that runs on this machine and for
                which the bundle has files.
            max_batch: Maximum batch size on a GPU. On the CPU, the batch size is 1.

        Raises:
            BundleError: The bundle is missing or damaged, or lacks the precision.
            BackendError: The backend is unknown, does not run here, or does not support the batch
                size.
            ValueError: `max_batch` is not an integer of 1 or more.
        """
        check_count("max_batch", max_batch)
        bundle = Path(bundle)
        self.manifest = read_manifest(bundle)
        self._max_batch = max_batch
        self._backend = load_backend(
            bundle,
            self.manifest,
            precision or served_precision(self.manifest, backend),
            backend,
            max_batch,
        )
        self._steps = HostSteps(self._backend, self.manifest, threads=1)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(
        self, images: Iterable[ImageSource | str], options: DetectionOptions = DEFAULT_OPTIONS
    ) -> list[Detections]:
        """Detect objects in several images, in batches. `detect` lists the valid types of an image.

        Returns:
            The detections of each image, in order.

        Raises:
            ImageError: An image is invalid. The message begins with its path, or with its index if
                it is not a file. (`detect_many` yields such errors and continues.)
            TypeError: `images` is one image, not several, or an image or `options` has an invalid
                type.
            BackendError: The detector is closed, memory runs out, or the backend fails.
            BundleError: The model's outputs contradict the bundle's manifest.
        """
        check_images(images)
        results: list[Detections] = []
        images, sources = tee(images)
        with closing(self.detect_many(images, options)) as outcomes:
            for outcome, source in zip(outcomes, sources, strict=True):
                if isinstance(outcome, ImageError):
                    is_file = isinstance(source, str | Path)
                    name = str(source) if is_file else f"image {len(results)}"
                    raise ImageError(f"{name}: {outcome}") from outcome
                results.append(outcome)
        return results

    def detect(
        self,
        image: ImageSource | str,
        options: DetectionOptions = DEFAULT_OPTIONS,
        max_pixels: int = MAX_PIXELS,
    ) -> Detections:
        """Detect objects in one image.

        Args:
            image: Content of a JPEG, PNG or WebP file, path of such a file or of a BMP or TIFF
                file, or RGB pixels [H, W, 3] uint8.
            options: Options that select the detections to return and the format of their masks.
            max_pixels: Maximum number of pixels of the image.

        Raises:
            TypeError: `image` or `options` has an invalid type.
            ValueError: `max_pixels` is not an integer of 1 or more.
            ImageError: The image is invalid, or has more than `max_pixels` pixels.
            BackendError: The detector is closed, memory runs out, or the backend fails.
            BundleError: The model's outputs contradict the bundle's manifest.
        """
        with self._while_open():
            check_options(options)
            check_count("max_pixels", max_pixels)
            preprocessing, buckets = self.manifest.preprocessing, self._backend.buckets
            source = _read_source(image, max_pixels)
            plan = plan_image(source, preprocessing, buckets, max_pixels=max_pixels)
            return self._steps.detect(ImageRequest(plan, options))

    def detect_many(
        self, images: Iterable[ImageSource | str], options: DetectionOptions = DEFAULT_OPTIONS
    ) -> Generator[Outcome, None, None]:
        """Detect objects in several images, in batches. `detect` lists the valid types of an image.

        While the model computes a batch, the next one is decoded; see the function
        `serving.offline.detect_many`, which this method calls.

        Yields:
            The detections or the error of each image, in order.

        Raises:
            TypeError: `images` is one image, not several, or `options` has an invalid type. Raised
                before the iteration starts.
            Exception: Iterating over `images` raised this error, or an image has an invalid type
                (TypeError). The error is raised after the outcomes of the preceding images.
            BackendError: The detector is closed, memory runs out, or the backend fails. A detector
                that is already closed raises it before the iteration starts.
            BundleError: The model's outputs contradict the bundle's manifest.
        """
        self._check_open()
        check_images(images)
        check_options(options)
        # On a CPU, larger batches are not faster and need more memory.
        max_batch = 1 if self._backend.device == "cpu" else self._max_batch

        def sources() -> Iterator[ImageSource | str]:
            for image in images:
                self._check_open()  # `close` may be called during the iteration
                yield image

        def outcomes() -> Generator[Outcome, None, None]:
            backend, manifest = self._backend, self.manifest
            with self._while_open():
                yield from detect_many(sources(), backend, manifest, options, max_batch=max_batch)

        return outcomes()

    def close(self) -> None:
        """Release the model. Later detections raise BackendError."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Context manager: if the detector is closed, before or in the block, raise BackendError.

        If the block succeeds although the detector is closed meanwhile, raise no error.
        """
        self._check_open()
        try:
            yield
        except Exception:
            self._check_open()  # the backend fails in other ways without its model
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the detector is closed; create a new one")


def detect_many(
    images: Iterable[ImageSource | str],
    backend: Backend,
    manifest: Manifest,
    options: DetectionOptions = DEFAULT_OPTIONS,
    *,
    max_batch: int = 8,
    apply_orientation: bool = True,
) -> Generator[Outcome, None, None]:
    """Detect objects in images, with bounded read-ahead.

    Decoding, inference and mask encoding of different batches overlap. With a `DeviceBackend`, all
    three run on the backend's device. With other backends, decoding and encoding run in CPU
    threads. At most one batch per CPU core is decoded at a time, and at most one per core encoded.

    Args:
        images: Contents of JPEG, PNG or WebP files, paths of image files, or RGB pixels [H, W, 3]
            uint8. The thread that consumes the results iterates over `images` and reads the files.
        backend: Backend, loaded for batches of `max_batch`.
        manifest: Manifest of the bundle that the backend was loaded from.
        options: Options that select the detections to keep and the format of their masks.
        max_batch: Maximum number of images in a batch.
        apply_orientation: Apply the rotation in the images' EXIF data.

    Returns:
        Generator of the detections or the error of each image, in input order. Closing the
        generator cancels the batches that have not started.
    """

    def plan(source: ImageSource | str) -> BatchEntry:
        try:
            image = plan_image(
                # A copy, because the caller may reuse an array before this image is resized.
                _read_source(source, MAX_PIXELS, copy=True),
                manifest.preprocessing,
                backend.buckets,
                apply_orientation=apply_orientation,
            )
        except ImageError as error:
            return error
        return ImageRequest(image, options)

    steps = batch_steps(backend, manifest, threads=len(os.sched_getaffinity(0)))
    return run_in_batches(map(plan, images), steps, max_batch)


def _read_source(image: ImageSource | str, max_pixels: int, *, copy: bool = False) -> SourceImage:
    """Return the content of an image file, or contiguous RGB pixels of at most `max_pixels`.

    The pixels are copied if `copy` is True or if they are not contiguous.
    """
    try:
        source = read_image_source(Path(image) if isinstance(image, str) else image)
    except OSError as error:
        raise image_error_from_os_error(error) from None
    if isinstance(source, bytes):
        return source
    # Check the size before the copy: there may be too little memory for a copy of a large array.
    height, width = source.shape[:2]
    check_size(height, width, max_pixels)
    return source.copy() if copy else np.ascontiguousarray(source)


def run_in_batches(
    entries: Iterable[BatchEntry], steps: BatchSteps, max_batch: int
) -> Generator[Outcome, None, None]:
    """Process images in batches, each for one input size. Several batches are in flight at once.

    Args:
        entries: Images, or the errors of invalid ones. The thread that consumes the results
            iterates over `entries`.
        steps: Decoding, inference and mask encoding for a backend, from `batch_steps`.
        max_batch: Maximum number of images in a batch.

    Yields:
        The detections or the error of each image, in order.

    Raises:
        Exception: Iterating over `entries` raised this error. Unless it is a BackendError, it is
            raised after the outcomes of the preceding images.
    """
    deferred = DeferredErrors(entries)
    threads = ThreadPoolExecutor(steps.concurrency, thread_name_prefix="batch")
    try:
        queue = _BatchQueue(threads, StepChain(steps), max_batch)
        for entry in deferred:
            queue.put(entry)
            while queue.is_due:
                yield queue.get()
        deferred.check(BackendError)  # the detector is closed, so there are no more results
        queue.flush()
        while queue:
            yield queue.get()
        deferred.check()
    finally:
        threads.shutdown(cancel_futures=True)
        steps.synchronize()


def batch_steps(backend: Backend, manifest: Manifest, *, threads: int) -> BatchSteps:
    """Return the processing steps of a batch: decoding, inference and mask encoding.

    If the backend is a `DeviceBackend`, return `DeviceSteps`, which decode images and encode masks
    on the backend's device. Otherwise return `HostSteps`, which decode and encode in CPU threads.

    Args:
        backend: Backend that runs the model.
        manifest: Manifest of the backend's bundle.
        threads: Maximum number of batches that are decoded at the same time. An equal limit applies
            to mask encoding. `DeviceSteps` ignore this argument.
    """
    if isinstance(backend, DeviceBackend):
        # Imported here because other backends must not load torch.
        from .engines.device_batches import FIRST_PAUSE_S
        from .engines.device_steps import DeviceSteps

        # Short pauses between polls for the end of a batch, because with longer ones some offline
        # runs were 7 % slower. The server uses longer pauses: they save CPU time, and did not slow
        # it down.
        return DeviceSteps(backend, manifest, longest_pause_s=FIRST_PAUSE_S)
    return HostSteps(backend, manifest, threads=threads)


@dataclass(eq=False)
class _PendingBatch:
    """Batch of images of one input size. `outcomes` is None until the batch starts."""

    requests: list[ImageRequest] = field(default_factory=list)
    outcomes: Future[list[Outcome]] | None = None


class _BatchRow(NamedTuple):
    """Position of an image in a batch."""

    batch: _PendingBatch
    row: int


class _BatchQueue:
    """FIFO queue of images that groups them into batches by input size.

    One thread of the pool `threads` runs all steps of a batch.
    """

    def __init__(self, threads: ThreadPoolExecutor, steps: StepChain, max_batch: int) -> None:
        self._threads = threads
        self._steps = steps
        self._max_batch = max_batch
        self._queue: deque[_BatchRow | ImageError] = deque()
        # Batches that are not full yet.
        self._open: dict[ShapeBucket, _PendingBatch] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, entry: BatchEntry) -> None:
        """Append an image, or the error of an invalid image, to the queue.

        An image also joins the incomplete batch of its input size. If the image completes the
        batch, start the batch.
        """
        if isinstance(entry, ImageError):
            self._queue.append(entry)
            return
        batch = self._open.setdefault(entry.bucket, _PendingBatch())
        self._queue.append(_BatchRow(batch, len(batch.requests)))
        batch.requests.append(entry)
        if len(batch.requests) == self._max_batch:
            self._start(entry.bucket)

    def flush(self) -> None:
        """Start all incomplete batches."""
        for bucket in tuple(self._open):
            self._start(bucket)

    @property
    def is_due(self) -> bool:
        """Whether the caller should call `get` now.

        True if the oldest image is done, or if the queue holds more images than fit into
        `_BATCHES_AHEAD` batches.
        """
        if len(self._queue) > _BATCHES_AHEAD * self._max_batch:
            return True
        if not self._queue or isinstance(self._queue[0], ImageError):
            return bool(self._queue)
        outcomes = self._queue[0].batch.outcomes
        return outcomes is not None and outcomes.done()

    def get(self) -> Outcome:
        """Remove the oldest image from the queue and return its outcome: detections or an error.

        If the image's batch has not started, start it. Wait for the outcome.
        """
        oldest = self._queue.popleft()
        if isinstance(oldest, ImageError):
            return oldest
        if oldest.batch.outcomes is None:
            self._start(oldest.batch.requests[0].bucket)
        assert oldest.batch.outcomes is not None
        return oldest.batch.outcomes.result()[oldest.row]

    def _start(self, bucket: ShapeBucket) -> None:
        batch = self._open.pop(bucket)
        batch.outcomes = self._threads.submit(self._steps, batch.requests)
        batch.requests = []  # frees the encoded images as soon as the steps have read them

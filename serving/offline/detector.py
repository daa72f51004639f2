"""Detection in one process, without a server."""

from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import Self

from ...model.bundle.manifest import Precision, read_manifest
from ...model.bundle.spec import MAX_PIXELS
from ...model.image_limits import ImageError
from ..backends.loading import load_backend, served_precision
from ..config import BackendName
from ..detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from ..errors import BackendError
from ..steps.base import ImageRequest, Outcome
from ..steps.host_steps import HostSteps
from ..steps.preprocessing import plan_image
from .bulk import detect_many


class Detector:
    """Detector that runs a bundle in this process. Its results equal those of the server.

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
        """Load a bundle.

        Args:
            bundle: Folder of the bundle.
            precision: Precision of inference. None: the first one that the bundle has for the
                backend.
            backend: Inference backend.
            max_batch: Maximum batch size on a GPU. On the CPU, the batch size is 1.

        Raises:
            BundleError: The bundle is missing or damaged, or lacks the precision.
            BackendError: The backend is unknown, does not run here, or does not support the batch
                size.
            ValueError: `max_batch` is less than 1.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; give 1 or more")
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
        self, images: Iterable[bytes | str | Path], options: DetectionOptions = DEFAULT_OPTIONS
    ) -> list[Detections]:
        """Detect objects in encoded images or files, in batches.

        Returns:
            The detections of each image, in order.

        Raises:
            ImageError: An image is invalid. (`detect_many` yields the error and continues.)
            TypeError: `images` is one image, not several.
            BackendError: The detector is closed.
        """
        results = []
        with closing(self.detect_many(images, options)) as outcomes:
            for outcome in outcomes:
                if isinstance(outcome, ImageError):
                    raise outcome
                results.append(outcome)
        return results

    def detect(
        self,
        data: bytes,
        options: DetectionOptions = DEFAULT_OPTIONS,
        max_pixels: int = MAX_PIXELS,
    ) -> Detections:
        """Detect objects in an encoded image.

        Raises:
            ImageError: The image is invalid, or has more than `max_pixels` pixels.
            BackendError: The detector is closed.
        """
        self._check_open()
        image = plan_image(
            data,
            self.manifest.preprocessing,
            self._backend.buckets,
            max_pixels=max_pixels,
            apply_orientation=True,
        )
        return self._steps.detect(ImageRequest(image, options))

    def detect_many(
        self, images: Iterable[bytes | str | Path], options: DetectionOptions = DEFAULT_OPTIONS
    ) -> Generator[Outcome, None, None]:
        """Detect objects in encoded images or files, in batches; see `bulk.detect_many`.

        Yields:
            The detections or the error of each image, in order.

        Raises:
            TypeError: `images` is one image, not several. Raised before the iteration starts.
            BackendError: The detector is closed. Raised before the iteration starts.
        """
        self._check_open()
        if isinstance(images, str | bytes | Path):
            raise TypeError(f"images must be a list of images, not {type(images).__name__}")
        sources = (image if isinstance(image, bytes) else Path(image) for image in images)
        # On a CPU, larger batches are not faster and need more memory.
        max_batch = 1 if self._backend.device == "cpu" else self._max_batch
        return detect_many(sources, self._backend, self.manifest, options, max_batch=max_batch)

    def close(self) -> None:
        """Release the model. Later detections raise BackendError."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the detector is closed; create a new one")

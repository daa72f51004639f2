"""Detection in one process, without a server."""

from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path

from ...model.bundle.manifest import Precision, read_manifest
from ...model.bundle.spec import MAX_PIXELS
from ...model.image_limits import ImageError
from ..backends.loading import load_backend, served_precision
from ..config import BackendName
from ..detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from ..steps.base import ImageRequest, Outcome
from ..steps.host_steps import HostSteps
from ..steps.preprocessing import plan_image
from .bulk import detect_many


class Detector:
    """A bundle loaded for detection in this process. Results equal those of the server.

    `Detector(bundle)(images)` returns the detections of several images.
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
            max_batch: Batch size of `detect_many` on a GPU.

        Raises:
            BundleError: The bundle is missing or damaged, or lacks the precision.
            BackendError: The backend does not run here, or does not support the batch size.
        """
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

    def __call__(
        self, images: Iterable[bytes | str | Path], options: DetectionOptions = DEFAULT_OPTIONS
    ) -> list[Detections]:
        """Detect objects in encoded images or files, in batches.

        Returns:
            The detections of each image, in order.

        Raises:
            ImageError: An image is invalid. `detect_many` continues with the others instead.
        """
        sources = (Path(image) if isinstance(image, str) else image for image in images)
        results = []
        with closing(self.detect_many(sources, options)) as outcomes:
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
            ImageError: The image is invalid.
        """
        image = plan_image(
            data,
            self.manifest.preprocessing,
            self._backend.buckets,
            max_pixels=max_pixels,
            apply_orientation=True,
        )
        return self._steps.detect(ImageRequest(image, options))

    def detect_many(
        self, images: Iterable[bytes | Path], options: DetectionOptions = DEFAULT_OPTIONS
    ) -> Generator[Outcome, None, None]:
        """Detect objects in encoded images or files, in batches; see `bulk.detect_many`.

        Yields:
            The detections or the error of each image, in order.
        """
        # On a CPU, larger batches are not faster and need more memory.
        max_batch = 1 if self._backend.device == "cpu" else self._max_batch
        return detect_many(images, self._backend, self.manifest, options, max_batch=max_batch)

    def close(self) -> None:
        """Release the model."""
        self._backend.close()

"""Detection in one process, without a server."""

from collections.abc import Generator, Iterable
from pathlib import Path

import numpy as np

from ...model.manifest import Precision, read_manifest
from ...model.spec import MAX_PIXELS
from ..backends.loading import load_backend, served_precision
from ..config import BackendName
from ..detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from ..steps.base import Outcome
from ..steps.postprocessing import detections_from_outputs
from ..steps.preprocessing import prepare_image
from .bulk import detect_many


class Predictor:
    """Detects in one image, or in many, as the server does."""

    def __init__(
        self,
        bundle: Path,
        precision: Precision | None = None,
        backend: BackendName = "auto",
        max_batch: int = 8,
    ) -> None:
        """Load a bundle.

        Args:
            bundle: The bundle's folder.
            precision: What to compute in; none, the backend's first precision in the bundle.
            backend: What computes.
            max_batch: Images that are computed at once where there are many; a CPU, which gains
                nothing by that but needs the memory, takes one at a time.

        Raises:
            BundleError: there is none, it is damaged or lacks the precision.
            BackendError: the backend does not run here, or not with such batches.
        """
        self.manifest = read_manifest(bundle)
        self._max_batch = max_batch
        self._backend = load_backend(
            bundle,
            self.manifest,
            precision or served_precision(self.manifest, backend),
            backend,
            max_batch,
        )

    def detect(
        self,
        data: bytes,
        options: DetectionOptions = DEFAULT_OPTIONS,
        max_pixels: int = MAX_PIXELS,
    ) -> Detections:
        """Detect in an encoded image.

        Raises:
            ImageError: the image cannot be used.
        """
        buckets = self._backend.buckets
        image = prepare_image(data, self.manifest.preprocessing, buckets, max_pixels)
        outputs = self._backend.infer(
            image.bucket, image.pixels[None], np.array([image.size], np.int64)
        )
        return detections_from_outputs(outputs, 0, image, self.manifest, options)

    def detect_many(
        self, images: Iterable[bytes | Path], options: DetectionOptions = DEFAULT_OPTIONS
    ) -> Generator[Outcome, None, None]:
        """Detect in encoded images or files, in batches; `bulk.detect_many` says how.

        Yields:
            In the order of the images what was found, or why an image cannot be read or used.
        """
        max_batch = 1 if self._backend.device == "cpu" else self._max_batch
        return detect_many(images, self._backend, self.manifest, options, max_batch=max_batch)

    def close(self) -> None:
        """Release the model."""
        self._backend.close()

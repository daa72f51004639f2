"""Detection in one process: no server, no batching."""

from pathlib import Path

import numpy as np

from ..model.manifest import Precision, read_manifest
from .backends.loading import load_backend, served_precision
from .config import BackendName, ServeConfig
from .detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from .postprocessing import detections_from_outputs
from .preprocessing import prepare_image


class Predictor:
    """Detects in one image after another, as the server does."""

    def __init__(
        self, bundle: Path, precision: Precision | None = None, backend: BackendName = "auto"
    ) -> None:
        """Load a bundle.

        Raises:
            BundleError: there is none, it is damaged or lacks the precision.
            BackendError: the backend does not run here.
        """
        self.manifest = read_manifest(bundle)
        self._backend = load_backend(
            bundle,
            self.manifest,
            precision or served_precision(self.manifest, backend),
            backend,
        )

    def detect(
        self,
        data: bytes,
        options: DetectionOptions = DEFAULT_OPTIONS,
        max_pixels: int = ServeConfig().max_pixels,
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

    def close(self) -> None:
        """Release the model."""
        self._backend.close()

"""A bundle as an engine, run by the backend that serves it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..model.manifest import Precision, read_manifest
from ..model.spec import ShapeBucket
from ..serving.backends.loading import load_backend
from ..serving.config import BackendName


class BundleEngine:
    """A bundle on one of its backends; copies from and to the host are part of its time."""

    def __init__(
        self, bundle: Path, precision: Precision, backend: BackendName, max_batch: int
    ) -> None:
        """Load a bundle; raises as `load_backend`."""
        manifest = read_manifest(bundle)
        self._backend = load_backend(bundle, manifest, precision, backend, max_batch)
        self.name = self._backend.name
        self.precision = precision
        self.device = self._backend.device

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes it can be bound to."""
        return self._backend.buckets

    def bind(self, images: NDArray[np.uint8]) -> Callable[[], None]:
        """A call over images [B, 3, H, W] of one of the buckets."""
        bucket = ShapeBucket(*images.shape[2:])
        sizes = np.full((len(images), 2), bucket, np.int64)

        def run() -> None:
            self._backend.infer(bucket, images, sizes)

        return run

    def close(self) -> None:
        """Give back the memory."""
        self._backend.close()

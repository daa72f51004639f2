"""A bundle as an engine, run by the backend that serves it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..model.manifest import Precision, read_manifest
from ..model.spec import ShapeBucket
from ..serving.backends.onnxruntime import OnnxRuntimeBackend


class BundleEngine:
    """A bundle on ONNX Runtime; copies from and to the host are part of its time."""

    name = "onnxruntime"

    def __init__(self, bundle: Path, precision: Precision) -> None:
        """Load a bundle.

        Raises:
            BundleError: it cannot be read or has nothing of that precision.
        """
        self.precision = precision
        on_gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        self.device = "cuda" if on_gpu else "cpu"
        self._backend = OnnxRuntimeBackend(bundle, read_manifest(bundle), precision)

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

"""ONNX Runtime, on a GPU where its CUDA provider is installed and on the CPU otherwise."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ...model.manifest import Manifest, Precision, verified_path
from ...model.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from .base import Outputs


class OnnxRuntimeBackend:
    """One session a shape bucket."""

    name = "onnxruntime"
    concurrency = 1

    def __init__(self, bundle: Path, manifest: Manifest, precision: Precision) -> None:
        """Load the bundle's artefacts of a precision.

        Raises:
            BundleError: the bundle has none, or one is missing or damaged.
        """
        on_gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        self.device: Literal["cpu", "cuda"] = "cuda" if on_gpu else "cpu"
        artifacts = manifest.artifacts_for(precision)
        self._sessions = {
            a.bucket: self._session(verified_path(bundle, a), precision) for a in artifacts
        }
        self._dtypes = {a.bucket: np.dtype(a.input_dtype) for a in artifacts}

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes of the sessions."""
        return tuple(self._sessions)

    def warm_up(self, max_batch: int) -> None:
        """Run every bucket once, on a GPU at the largest batch too."""
        for bucket in self.buckets:
            for batch in {1, max_batch} if self.device == "cuda" else {1}:
                images = np.zeros((batch, 3, *bucket), np.uint8)
                self.infer(bucket, images, np.full((batch, 2), bucket, np.int64))

    def infer(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> Outputs:
        """Detect in a batch [B, 3, H, W] of one bucket; `image_sizes` is [B, 2]."""
        inputs = (images.astype(self._dtypes[bucket], copy=False), image_sizes)
        feed = dict(zip(INPUT_NAMES, inputs, strict=True))
        return Outputs(*self._sessions[bucket].run(OUTPUT_NAMES, feed))

    def close(self) -> None:
        """Drop the sessions."""
        self._sessions.clear()

    def _session(self, path: Path, precision: Precision) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Threads that spin between runs would take the cores from decoding and encoding.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.device == "cuda":
            onnxruntime.preload_dlls()
            cuda = {"prefer_nhwc": "1", "use_tf32": str(int(precision == "tf32"))}
            providers.insert(0, ("CUDAExecutionProvider", cuda))
        return onnxruntime.InferenceSession(path, options, providers=providers)

"""ONNX Runtime, on a GPU where its CUDA provider is installed and on the CPU otherwise."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ...model.manifest import Manifest, Precision, verified_path
from ...model.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from .base import Outputs

_log = logging.getLogger(__name__)

_CUDA = "CUDAExecutionProvider"
_BATCH_AXIS = "batch"  # as the exporter calls it


class OnnxRuntimeBackend:
    """One session a shape bucket; on a GPU, one a bucket and batch size.

    On a GPU a convolution keeps cuDNN's plan for the shape it saw last and no other, so that every
    change of the batch size would cost more than the batch. Hence batches are padded to powers of
    two, each with a session of its own, in which all shapes are known beforehand.
    """

    name = "onnxruntime"
    concurrency = 1

    def __init__(self, bundle: Path, manifest: Manifest, precision: Precision) -> None:
        """Load the bundle's artefacts of a precision.

        Raises:
            BundleError: the bundle has none, or one is missing or damaged.
        """
        self._precision = precision
        artifacts = manifest.artifacts_for(precision)
        self._paths = {a.bucket: verified_path(bundle, a) for a in artifacts}
        self._dtypes = {a.bucket: np.dtype(a.input_dtype) for a in artifacts}
        on_gpu = _CUDA in onnxruntime.get_available_providers()
        self.device: Literal["cpu", "cuda"] = "cuda" if on_gpu else "cpu"
        self._sessions = self._first_sessions()
        if on_gpu and any(_CUDA not in s.get_providers() for s in self._sessions.values()):
            _log.warning(
                "onnxruntime computes on the CPU, for its CUDA provider does not load; see whether "
                "nvidia-smi finds a GPU, and install the CUDA and cuDNN that onnxruntime-gpu names"
            )
            self.device = "cpu"
            self._sessions = self._first_sessions()

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes of the artefacts."""
        return tuple(self._paths)

    def warm_up(self, max_batch: int) -> None:
        """Run every bucket once, on a GPU at every batch size that it computes."""
        largest = max_batch if self.device == "cuda" else 1
        for bucket in self.buckets:
            for batch in sorted({self._computed_batch(n) for n in range(1, largest + 1)}):
                images = np.zeros((batch, 3, *bucket), np.uint8)
                self.infer(bucket, images, np.full((batch, 2), bucket, np.int64))

    def infer(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> Outputs:
        """Detect in a batch [B, 3, H, W] of one bucket; `image_sizes` is [B, 2]."""
        session, inputs = self._prepare(bucket, images, image_sizes)
        outputs = session.run(OUTPUT_NAMES, inputs)
        return Outputs(*(output[: len(images)] for output in outputs))

    def bind_on_device(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> Callable[[], Any]:
        """Copy a batch to where the backend computes, to compute it there as often as wanted.

        Args:
            bucket: One of `buckets`.
            images: [B, 3, bucket.height, bucket.width] RGB.
            image_sizes: [B, 2] height and width before padding.

        Returns:
            A call that returns when the detections are complete. It leaves them where they are, as
            an `OrtValue` for each of `model.spec.OUTPUT_NAMES`, padded as the batch is.
        """
        session, inputs = self._prepare(bucket, images, image_sizes)
        binding = session.io_binding()
        for name, array in inputs.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array, self.device)
            binding.bind_ortvalue_input(name, value)
        for name in OUTPUT_NAMES:
            binding.bind_output(name, self.device)

        def compute() -> Any:
            session.run_with_iobinding(binding)
            return binding.get_outputs()

        return compute

    def close(self) -> None:
        """Drop the sessions."""
        self._sessions.clear()

    def _prepare(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> tuple[onnxruntime.InferenceSession, dict[str, NDArray[Any]]]:
        """The session that computes a batch, and its inputs by name."""
        batch = self._computed_batch(len(images))
        arrays = (images.astype(self._dtypes[bucket], copy=False), image_sizes)
        inputs = {n: _padded(a, batch) for n, a in zip(INPUT_NAMES, arrays, strict=True)}
        return self._session(bucket, batch), inputs

    def _computed_batch(self, batch: int) -> int:
        """The size that a batch is padded to."""
        return 1 << (batch - 1).bit_length() if self.device == "cuda" else batch

    def _first_sessions(self) -> dict[tuple[ShapeBucket, int | None], Any]:
        fixed = 1 if self.device == "cuda" else None
        return {(bucket, fixed): self._new_session(bucket, fixed) for bucket in self.buckets}

    def _session(self, bucket: ShapeBucket, batch: int) -> onnxruntime.InferenceSession:
        key = bucket, batch if self.device == "cuda" else None
        if key not in self._sessions:
            self._sessions[key] = self._new_session(*key)
        return self._sessions[key]

    def _new_session(self, bucket: ShapeBucket, batch: int | None) -> onnxruntime.InferenceSession:
        """A session for batches of one size, or of any."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Threads that spin between runs would take the cores from decoding and encoding.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if batch is not None:
            options.add_free_dimension_override_by_name(_BATCH_AXIS, batch)
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.device == "cuda":
            onnxruntime.preload_dlls()
            providers.insert(0, (_CUDA, cuda_options(self._precision)))
        return onnxruntime.InferenceSession(self._paths[bucket], options, providers=providers)


def cuda_options(precision: Precision) -> dict[str, str]:
    """Options of ONNX Runtime's CUDA provider.

    CUDA graphs are not among them: ONNX Runtime captures no model with a `Loop`, which the body of
    `NmsKeep` has.
    """
    return {
        "prefer_nhwc": "1",
        # Without it convolutions keep off the tensor cores, those in half precision too.
        "use_tf32": "0" if precision == "fp32" else "1",
        # A session sees one shape: what it asks for first is what it needs.
        "arena_extend_strategy": "kSameAsRequested",
    }


def _padded(rows: NDArray[Any], count: int) -> NDArray[Any]:
    """Rows with zeros after them, as many as there are to be."""
    missing = [(0, count - len(rows)), *[(0, 0)] * (rows.ndim - 1)]
    return np.pad(rows, missing) if len(rows) < count else rows

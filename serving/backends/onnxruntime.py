"""ONNX Runtime, on a GPU where its CUDA provider is installed and on the CPU otherwise."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ...model.manifest import Manifest, Precision, verified_path
from ...model.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from ..errors import BackendError
from .base import Outputs, batch_sizes, black_batch, check_outputs

_log = logging.getLogger(__name__)

_CUDA = "CUDAExecutionProvider"
_BATCH_AXIS = "batch"  # as the exporter calls it
_ANY = -1
"""Batch size of a session that takes every size."""
_AMPLE_BYTES, _AMPLE_BYTES_PER_PIXEL = 1 << 30, 3 << 10
"""More than twice what a session takes with its weights, if its convolutions need little beside."""
_OUT_OF_MEMORY = ("Failed to allocate memory", "is smaller than requested bytes")
"""What ONNX Runtime says where the GPU or the bound on a session has no more."""


class OnnxRuntimeBackend:
    """One session a shape bucket; on a GPU, one a bucket and batch size.

    On a GPU a convolution keeps cuDNN's plan for the shape it saw last and no other, so that every
    change of the batch size would cost more than the batch. Hence a session there computes batches
    of one size, with all shapes known beforehand, and smaller batches are padded to it.
    """

    name = "onnxruntime"
    concurrency = 1

    def __init__(self, bundle: Path, manifest: Manifest, precision: Precision) -> None:
        """Load the bundle's artefacts of a precision.

        Raises:
            BundleError: the bundle has none, or one is missing or damaged.
        """
        self._manifest = manifest
        self._precision = precision
        artifacts = manifest.artifacts_for(precision)
        self._paths = {a.bucket: verified_path(bundle, a) for a in artifacts}
        self._dtypes = {a.bucket: np.dtype(a.input_dtype) for a in artifacts}
        self._sessions: dict[ShapeBucket, dict[int, onnxruntime.InferenceSession]] = {}
        on_gpu = _CUDA in onnxruntime.get_available_providers()
        self.device: Literal["cpu", "cuda"] = "cuda" if on_gpu else "cpu"
        self._load()
        loaded = [s.get_providers() for own in self._sessions.values() for s in own.values()]
        if on_gpu and not all(_CUDA in providers for providers in loaded):
            _log.warning(
                "onnxruntime computes on the CPU, for its CUDA provider does not load; see whether "
                "nvidia-smi finds a GPU, and install the CUDA and cuDNN that onnxruntime-gpu names"
            )
            self.device = "cpu"
            self._load()

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes of the artefacts."""
        return tuple(self._paths)

    def warm_up(self, max_batch: int) -> None:
        """Run every bucket once, on a GPU at every size that batches are then padded to.

        Raises:
            BundleError: what comes out does not fit the manifest.
        """
        for bucket in self.buckets:
            for batch in batch_sizes(max_batch if self.device == "cuda" else 1):
                check_outputs(self.infer(bucket, *black_batch(bucket, batch)), self._manifest)

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
        inputs = self._inputs(bucket, images, image_sizes)
        sessions = self._sessions[bucket]
        if self.device == "cpu":
            return sessions[_ANY], inputs
        size = min((size for size in sessions if size >= len(images)), default=len(images))
        if size not in sessions:
            sessions[size] = self._fitting_session(bucket, size)
        return sessions[size], {name: _padded(array, size) for name, array in inputs.items()}

    def _inputs(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """A batch by name, in the types of the artefact."""
        arrays = (images.astype(self._dtypes[bucket], copy=False), image_sizes)
        return dict(zip(INPUT_NAMES, arrays, strict=True))

    def _load(self) -> None:
        """Make the first session of every bucket."""
        if self.device == "cuda":
            self._sessions = {b: {1: self._fitting_session(b, 1)} for b in self.buckets}
        else:
            self._sessions = {b: {_ANY: self._new_session(b, _ANY)} for b in self.buckets}

    def _fitting_session(self, bucket: ShapeBucket, size: int) -> onnxruntime.InferenceSession:
        """A session on the GPU that found enough memory for its first runs.

        ONNX Runtime takes the first way to convolve that cuDNN names, however much memory it asks
        for. Without tensor cores that was 36 GB for one convolution of eight images. So a session
        gets ample memory but not all, and where that does not do, one takes its place whose
        convolutions need next to none. If even that fails, the sessions of smaller batches make
        room, which are padded to this one's size then.

        Raises:
            BackendError: there is not even memory enough for this session alone.
        """
        inputs = self._inputs(bucket, *black_batch(bucket, size))
        ample = _AMPLE_BYTES + _AMPLE_BYTES_PER_PIXEL * size * bucket.height * bucket.width
        smaller = self._sessions.get(bucket, {})
        while True:
            for memory_bound in (ample, None):
                session = self._new_session(bucket, size, memory_bound)
                try:
                    for _ in range(2):  # the second finds memory as the first has divided it
                        session.run(OUTPUT_NAMES, inputs)
                except Exception as error:  # which the runtime gives no type of its own
                    if not any(text in str(error) for text in _OUT_OF_MEMORY):
                        raise
                else:
                    return session
                del session
                _log.info("batches of %d are convolved in ways that need less memory", size)
            if not smaller:
                raise BackendError(
                    f"the GPU has too little memory free for batches of {size} in "
                    f"{self._precision}; lower --max-batch, or --batch where there is no server"
                )
            smaller.clear()

    def _new_session(
        self, bucket: ShapeBucket, size: int, memory_bound: int | None = None
    ) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Threads that spin between runs would take the cores from decoding and encoding.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        cores = len(os.sched_getaffinity(0))
        if cores < (os.cpu_count() or cores):
            # ONNX Runtime itself takes all of the machine, those that are not for this process too.
            options.intra_op_num_threads = cores
        if size != _ANY:
            options.add_free_dimension_override_by_name(_BATCH_AXIS, size)
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.device == "cuda":
            onnxruntime.preload_dlls()
            # Or it would say of each convolution that it needs little memory.
            onnxruntime.set_default_logger_severity(options.log_severity_level)
            providers.insert(0, (_CUDA, cuda_options(self._precision, memory_bound)))
        return onnxruntime.InferenceSession(self._paths[bucket], options, providers=providers)


def cuda_options(precision: Precision, memory_bound: int | None) -> dict[str, str]:
    """Options of ONNX Runtime's CUDA provider.

    CUDA graphs are not among them: ONNX Runtime captures no model with a `Loop`, which the body of
    `NmsKeep` has.

    Args:
        precision: what to compute in.
        memory_bound: bytes that the session may take to convolve as fast as cuDNN knows. Without
            it convolutions are those that need little memory.
    """
    options = {
        "prefer_nhwc": "1",
        # Without it convolutions keep off the tensor cores, those in half precision too.
        "use_tf32": "0" if precision == "fp32" else "1",
        # A session sees one shape: what it asks for first is what it needs.
        "arena_extend_strategy": "kSameAsRequested",
    }
    if memory_bound is None:
        return options | {"cudnn_conv_algo_search": "DEFAULT"}
    return options | {"cudnn_conv_algo_search": "EXHAUSTIVE", "gpu_mem_limit": str(memory_bound)}


def _padded(rows: NDArray[Any], count: int) -> NDArray[Any]:
    """Rows with zeros after them, as many as there are to be."""
    missing = [(0, count - len(rows)), *[(0, 0)] * (rows.ndim - 1)]
    return np.pad(rows, missing) if len(rows) < count else rows

"""Backend for ONNX Runtime. It uses a GPU if the CUDA execution provider loads, else the CPU."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import (
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NoSuchFile,
)

from ...model.bundle.manifest import BundleError, Manifest, Precision, verified_path
from ...model.bundle.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from ...model.resizing import Pixels
from ..errors import BackendError
from .base import HostOutputs, ModelOutputs, batch_sizes, black_batch, check_outputs

_log = logging.getLogger(__name__)

_CUDA = "CUDAExecutionProvider"
# Name of the batch dimension in exported models.
_BATCH_AXIS = "batch"
# Key, in place of a batch size, of a session that computes batches of any size.
_ANY = -1
# Memory limit of a GPU session in bytes: a constant, plus an amount per pixel of its batch. The
# limit is more than twice the memory that a session with small convolution workspaces needs.
_AMPLE_BYTES, _AMPLE_BYTES_PER_PIXEL = 1 << 30, 3 << 10
# ONNX Runtime's exceptions for a model file that is missing, damaged or empty.
_INVALID_MODEL = (InvalidArgument, InvalidGraph, InvalidProtobuf, NoSuchFile)
# ONNX Runtime's names of the dtypes of images.
_TYPE_NAMES = {np.dtype(np.uint8): "tensor(uint8)", np.dtype(np.float32): "tensor(float)"}
# Texts in ONNX Runtime's errors when the GPU's memory or the session's limit is exhausted.
_OUT_OF_MEMORY = ("Failed to allocate memory", "is smaller than requested bytes")


class OnnxRuntimeBackend:
    """Backend that runs ONNX models with ONNX Runtime.

    On the CPU there is one session per input size. On a GPU there is one session with fixed shapes
    per pair of input size and batch size; smaller batches are padded.
    """

    # On a GPU a convolution keeps only cuDNN's plan for its most recent input shape. If one session
    # computed all batch sizes, each change of the batch size would cost more than the batch itself.

    name = "onnxruntime"
    concurrency = 1

    def __init__(self, bundle: Path, manifest: Manifest, precision: Precision) -> None:
        """Load the bundle's ONNX models of a precision.

        Raises:
            BundleError: the bundle has no model of this precision, a model's file is missing or
                damaged, or a model's inputs differ from those in the manifest.
            BackendError: the GPU has too little free memory.
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
        loaded = [
            s.get_providers() for sessions in self._sessions.values() for s in sessions.values()
        ]
        if on_gpu and not all(_CUDA in providers for providers in loaded):
            _log.warning(
                "onnxruntime uses the CPU because its CUDA provider does not load; check that "
                "nvidia-smi finds a GPU, and install the versions of CUDA and cuDNN that "
                "onnxruntime-gpu requires"
            )
            self.device = "cpu"
            self._load()

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes of the models."""
        return tuple(self._paths)

    def warm_up(self, max_batch: int) -> None:
        """Run the model of every input size once; on a GPU, once with each batch size.

        The batch sizes are `batch_sizes(max_batch)`. The method raises the same errors as `infer`.
        """
        for bucket in self.buckets:
            for batch in batch_sizes(max_batch if self.device == "cuda" else 1):
                self.infer(bucket, *black_batch(bucket, batch))

    def infer(
        self, bucket: ShapeBucket, images: Pixels, image_sizes: NDArray[np.int64]
    ) -> HostOutputs:
        """Run the model on images [B, 3, H, W] that are padded to the input size `bucket`.

        `image_sizes` [B, 2] are the images' heights and widths before padding. The method
        returns the model's outputs for the B images as NumPy arrays.

        Raises:
            BundleError: the output masks do not have the shape that the bundle's manifest states.
            BackendError: the GPU has too little free memory for this batch size.
        """
        session, inputs = self._prepare(bucket, images, image_sizes)
        results = session.run(OUTPUT_NAMES, inputs)
        outputs = ModelOutputs(*(result[: len(images)] for result in results))
        check_outputs(outputs, self._manifest)
        return outputs

    def bind_on_device(
        self, bucket: ShapeBucket, images: Pixels, image_sizes: NDArray[np.int64]
    ) -> Callable[[], Any]:
        """Copy a batch to the backend's device, and return a function that computes it.

        Benchmarks time the returned function, which copies nothing between host and device.

        Args:
            bucket: One of `buckets`.
            images: [B, 3, bucket.height, bucket.width] RGB.
            image_sizes: [B, 2] height and width before padding.

        Returns:
            Function that computes the batch, waits for it, and returns an `OrtValue` on the device
            for each of `model.bundle.spec.OUTPUT_NAMES`. On a GPU, the batch may be padded with
            black images, whose results the outputs include.
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
        """Release all ONNX Runtime sessions."""
        self._sessions.clear()

    def _prepare(
        self, bucket: ShapeBucket, images: Pixels, image_sizes: NDArray[np.int64]
    ) -> tuple[onnxruntime.InferenceSession, dict[str, NDArray[Any]]]:
        """Return the session for a batch, and the model's inputs by name.

        On a GPU the inputs are padded to the session's batch size.
        """
        inputs = self._inputs(bucket, images, image_sizes)
        sessions = self._sessions[bucket]
        if self.device == "cpu":
            return sessions[_ANY], inputs
        size = min((size for size in sessions if size >= len(images)), default=len(images))
        if size not in sessions:
            sessions[size] = self._fitting_session(bucket, size)
        return sessions[size], {name: _padded(array, size) for name, array in inputs.items()}

    def _inputs(
        self, bucket: ShapeBucket, images: Pixels, image_sizes: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """Return a batch as the model's inputs by name, converted to the inputs' dtypes."""
        arrays = (images.astype(self._dtypes[bucket], copy=False), image_sizes)
        return dict(zip(INPUT_NAMES, arrays, strict=True))

    def _load(self) -> None:
        """Create one session per input size.

        On the CPU the session computes batches of any size. On a GPU it computes batches of one
        image; the session for a larger batch size is created when its first batch arrives.
        """
        if self.device == "cuda":
            self._sessions = {b: {1: self._fitting_session(b, 1)} for b in self.buckets}
        else:
            self._sessions = {b: {_ANY: self._new_session(b, _ANY)} for b in self.buckets}

    def _fitting_session(self, bucket: ShapeBucket, size: int) -> onnxruntime.InferenceSession:
        """Create a GPU session for one batch size, and run it so that its memory is allocated.

        If GPU memory is short, the sessions of this input size for smaller batches are released.

        Raises:
            BackendError: the GPU has too little free memory, even without these sessions.
        """
        # ONNX Runtime uses the first convolution algorithm that cuDNN returns, however much memory
        # its workspace takes: 36 GB for one convolution of eight images without tensor cores.
        # Therefore the session gets a memory limit. If this session runs out of memory, a session
        # with low-memory algorithms replaces it. If that fails too, the sessions for smaller
        # batches are released, and smaller batches are padded to this size from then on.
        inputs = self._inputs(bucket, *black_batch(bucket, size))
        ample = _AMPLE_BYTES + _AMPLE_BYTES_PER_PIXEL * size * bucket.height * bucket.width
        smaller = self._sessions.get(bucket, {})
        while True:
            for memory_bound in (ample, None):
                session = self._new_session(bucket, size, memory_bound)
                try:
                    # Run twice: the first run fragments the memory, and the second run needs more.
                    for _ in range(2):
                        session.run(OUTPUT_NAMES, inputs)
                except Exception as error:  # exhausted memory has no exception type of its own
                    if not any(text in str(error) for text in _OUT_OF_MEMORY):
                        raise
                else:
                    return session
                del session
                _log.info(
                    "too little GPU memory for batches of %d images; trying algorithms that need "
                    "less memory",
                    size,
                )
            if not smaller:
                raise BackendError(
                    f"the GPU has too little free memory for batches of {size} images in "
                    f"{self._precision}; lower --max-batch (--batch in `maskrcnn eval` and "
                    "`maskrcnn bench`)"
                )
            smaller.clear()

    def _new_session(
        self, bucket: ShapeBucket, size: int, memory_bound: int | None = None
    ) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Threads that spin between runs would occupy the cores that decode and encode.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        cores = len(os.sched_getaffinity(0))
        if cores < (os.cpu_count() or cores):
            # By default ONNX Runtime starts a thread for each core of the machine, even if this
            # process may use only some of them.
            options.intra_op_num_threads = cores
        if size != _ANY:
            options.add_free_dimension_override_by_name(_BATCH_AXIS, size)
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.device == "cuda":
            onnxruntime.preload_dlls()
            # Otherwise ONNX Runtime logs a warning for each low-memory convolution.
            onnxruntime.set_default_logger_severity(options.log_severity_level)
            providers.insert(0, (_CUDA, cuda_options(self._precision, memory_bound)))
        path = self._paths[bucket]
        try:
            session = onnxruntime.InferenceSession(path, options, providers=providers)
        except _INVALID_MODEL as error:
            raise BundleError(
                f"{path} is missing or is not a valid ONNX model; export the bundle again ({error})"
            ) from None
        expected = {
            INPUT_NAMES[0]: (_TYPE_NAMES[self._dtypes[bucket]], [3, *bucket]),
            INPUT_NAMES[1]: ("tensor(int64)", [2]),
        }
        actual = {i.name: (i.type, i.shape[1:]) for i in session.get_inputs()}
        if actual != expected:
            raise BundleError(
                f"{path} has the inputs {actual}, but the manifest needs {expected}; export the "
                "bundle again"
            )
        return session


def cuda_options(precision: Precision, memory_bound: int | None) -> dict[str, str]:
    """Return the options of ONNX Runtime's CUDA provider.

    Args:
        precision: Precision of the model.
        memory_bound: GPU memory limit of the session in bytes. Within the limit, the session uses
            the fastest cuDNN algorithms, which may need much memory. None: no limit, but cuDNN
            algorithms that need little memory.
    """
    # The option `enable_cuda_graph` is not set, because ONNX Runtime cannot capture a model with
    # the operator `Loop`, and non-maximum suppression (`NmsKeep`) uses one.
    options = {
        "prefer_nhwc": "1",
        # Without TF32, convolutions do not use tensor cores, not even in half precision.
        "use_tf32": "0" if precision == "fp32" else "1",
        # The shapes are fixed, so the first allocation has the right size.
        "arena_extend_strategy": "kSameAsRequested",
    }
    if memory_bound is None:
        return options | {"cudnn_conv_algo_search": "DEFAULT"}
    return options | {"cudnn_conv_algo_search": "EXHAUSTIVE", "gpu_mem_limit": str(memory_bound)}


def _padded(rows: NDArray[Any], count: int) -> NDArray[Any]:
    """Pad an array with zeros until its first dimension has the length `count`."""
    missing = [(0, count - len(rows)), *[(0, 0)] * (rows.ndim - 1)]
    return np.pad(rows, missing) if len(rows) < count else rows

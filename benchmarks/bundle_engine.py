"""A bundle as an engine, run by the backend that serves it."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..model.manifest import BundleError, Precision, read_manifest
from ..model.spec import OUTPUT_NAMES, ShapeBucket
from ..serving.backends.base import Backend
from ..serving.backends.loading import load_backend
from ..serving.config import BackendName
from .engines import DataPlace, Run
from .memory import MemoryKind

if TYPE_CHECKING:
    from ..serving.backends.onnxruntime import OnnxRuntimeBackend
    from ..serving.backends.torch import TorchBackend


class BundleEngine:
    """A bundle on one of its backends, for images of one size."""

    def __init__(
        self,
        bundle: Path,
        precision: Precision,
        backend: BackendName,
        bucket: ShapeBucket,
        max_batch: int,
    ) -> None:
        """Load a bundle; raises as `load_backend`, and where it does not have that input size."""
        manifest = read_manifest(bundle)
        self._bucket = bucket
        self._backend = load_backend(bundle, manifest, precision, backend, max_batch)
        if bucket not in self._backend.buckets:
            sizes = ", ".join(map(str, self._backend.buckets))
            raise BundleError(f"{bundle} has no input size {bucket}; choose from {sizes}")

    def runs_over(self, images: NDArray[np.uint8]) -> list[Run]:
        """On the device where the backend can, and from host to host, a batch at a time."""
        backend, bucket = self._backend, self._bucket
        sizes = np.full((len(images), 2), bucket, np.int64)
        infer = functools.partial(backend.infer, bucket, images, sizes)
        on_host = _run(backend, "host", infer, lambda found: found.num_detections)
        if backend.name == "onnxruntime":
            onnxruntime = cast("OnnxRuntimeBackend", backend)
            return [_run_of_onnxruntime(onnxruntime, bucket, images, sizes), on_host]
        if backend.name == "torch":
            return [_run_of_torch(cast("TorchBackend", backend), bucket, images, sizes), on_host]
        return [on_host]


def _run_of_onnxruntime(
    backend: "OnnxRuntimeBackend",
    bucket: ShapeBucket,
    images: NDArray[np.uint8],
    image_sizes: NDArray[np.int64],
) -> Run:
    numbers = OUTPUT_NAMES.index("num_detections")
    return _run(
        backend,
        "device",
        backend.bind_on_device(bucket, images, image_sizes),
        lambda found: found[numbers].numpy()[: len(images)],
    )


def _run_of_torch(
    backend: "TorchBackend",
    bucket: ShapeBucket,
    images: NDArray[np.uint8],
    image_sizes: NDArray[np.int64],
) -> Run:
    import torch

    on_device = [torch.from_numpy(array).to(backend.device) for array in (images, image_sizes)]
    return _run(
        backend,
        "device",
        lambda: backend.infer_on_device(bucket, *on_device),
        lambda found: found.num_detections.tolist(),
        torch.cuda.synchronize if backend.device == "cuda" else None,
    )


def _run(
    backend: Backend,
    data: DataPlace,
    queue: Callable[[], object],
    counts_in: Callable[[Any], Iterable[int]],
    wait: Callable[[], object] | None = None,
) -> Run:
    memory: MemoryKind = "torch" if backend.name == "torch" else "driver"
    return Run(
        engine=backend.name,
        device=backend.device,
        data=data,
        memory="cpu" if backend.device == "cpu" else memory,
        queue=queue,
        counts_in=counts_in,
        wait=wait,
    )

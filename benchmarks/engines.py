"""What runs a model that is named by its path."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..model.manifest import BundleError, Precision, read_manifest
from ..model.spec import ShapeBucket
from ..serving.config import BackendName


class Engine(Protocol):
    """Something that detects in whole batches."""

    @property
    def name(self) -> str:
        """What computes, such as `onnxruntime`."""

    @property
    def precision(self) -> str:
        """Arithmetic, such as `fp16`."""

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""

    def bind(self, images: NDArray[np.uint8]) -> Callable[[], None]:
        """A call that returns when the detections of [B, 3, H, W] images are complete."""

    def close(self) -> None:
        """Give back the memory."""


def engines_from_path(
    path: Path,
    precision: Precision,
    bucket: ShapeBucket,
    *,
    backend: BackendName,
    max_batch: int,
    with_torchvision: bool,
) -> Iterator[Engine]:
    """Engines of a bundle (a folder) or of a checkpoint (a file), each made when it is its turn.

    Args:
        path: What export or training wrote.
        precision: Arithmetic.
        bucket: Input size of the images that the engines are going to be bound to.
        backend: What computes bundles.
        max_batch: Largest batch that they are going to be bound to.
        with_torchvision: Torchvision's model with the weights of a checkpoint comes too.

    Raises:
        BundleError: the bundle cannot be read or lacks what is asked for.
        BackendError: the backend does not run here, or not with such batches.
        CheckpointError: the file is no checkpoint.
    """
    if path.is_dir():
        from .bundle_engine import BundleEngine

        engine = BundleEngine(path, precision, backend, max_batch)
        if bucket not in engine.buckets:
            sizes = ", ".join(map(str, engine.buckets))
            raise BundleError(f"{path} has no input size {bucket}; choose from {sizes}")
        yield engine
    else:
        from ..model.checkpoint import load_checkpoint
        from .torch_engines import engine_from_checkpoint, torchvision_from_checkpoint

        checkpoint = load_checkpoint(path)
        yield engine_from_checkpoint(checkpoint, precision)
        if with_torchvision:
            yield torchvision_from_checkpoint(checkpoint, precision)


def first_bucket(path: Path) -> ShapeBucket:
    """First input size of a bundle or a checkpoint; raises as `engines_from_path`."""
    if path.is_dir():
        return read_manifest(path).artifacts[0].bucket
    from ..model.checkpoint import load_checkpoint

    return load_checkpoint(path).buckets[0]

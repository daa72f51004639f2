"""What runs a model that is named by its path."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..model.manifest import Precision, read_manifest
from ..model.spec import ShapeBucket
from ..serving.config import BackendName
from .memory import MemoryKind

DataPlace = Literal["device", "host"]


@dataclass(frozen=True)
class Run:
    """A way to compute a batch that is at hand."""

    engine: str
    """What computes, such as `onnxruntime`."""
    device: Literal["cpu", "cuda"]
    """Where it computes."""
    data: DataPlace
    """Where the images lie and the detections end up: where it computes, or on the host."""
    memory: MemoryKind
    """How the memory that it needs is counted."""
    queue: Callable[[], object]
    """Begins the batch, and returns what will have been found in it."""
    counts_in: Callable[[Any], Iterable[int]]
    """Numbers of detections, one an image, in what `queue` returned; for a complete batch."""
    wait: Callable[[], object] | None = None
    """Returns when all batches that were begun are complete; None where `queue` waits itself."""

    def complete(self) -> object:
        """Compute the batch, and return what was found in it."""
        found = self.queue()
        if self.wait is not None:
            self.wait()
        return found


class Engine(Protocol):
    """Something that detects in whole batches."""

    def runs_over(self, images: NDArray[np.uint8]) -> Sequence[Run]:
        """Ways to compute images [B, 3, H, W] of the size that it was loaded for."""


@dataclass(frozen=True)
class EngineChoice:
    """What is measured, in a process of its own."""

    model: Path
    """A bundle, which is a folder, or a checkpoint."""
    precision: Precision
    backend: BackendName = "auto"
    """What computes a bundle."""
    with_torchvision: bool = False
    """Torchvision's model computes, with the weights of the checkpoint."""

    @property
    def name(self) -> str:
        """What computes, as far as it is known before it is loaded."""
        if self.model.is_dir():
            return "bundle" if self.backend == "auto" else self.backend
        return "torchvision" if self.with_torchvision else "eager"

    def load(self, bucket: ShapeBucket, max_batch: int) -> Engine:
        """Load it for an input size, and batches of at most so many images.

        Raises:
            BundleError: the bundle cannot be read or lacks what is asked for.
            BackendError: the backend does not run here, or not with such batches.
            CheckpointError: the file is no checkpoint, or torchvision has no such model.
        """
        if self.model.is_dir():
            from .bundle_engine import BundleEngine

            return BundleEngine(self.model, self.precision, self.backend, bucket, max_batch)
        from ..model.checkpoint import load_checkpoint
        from .torch_engines import engine_from_checkpoint, torchvision_from_checkpoint

        make = torchvision_from_checkpoint if self.with_torchvision else engine_from_checkpoint
        return make(load_checkpoint(self.model), self.precision)


def first_bucket(path: Path) -> ShapeBucket:
    """First input size of a bundle or a checkpoint.

    Raises:
        BundleError: the bundle cannot be read.
        CheckpointError: the file is no checkpoint.
    """
    if path.is_dir():
        return read_manifest(path).artifacts[0].bucket
    from ..model.checkpoint import load_checkpoint

    return load_checkpoint(path).buckets[0]

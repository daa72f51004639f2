"""What computes batches: the one interface of it, and the one for any backend."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from ..model.manifest import Manifest, Precision
from ..model.spec import ShapeBucket
from .backends.base import Backend, Outputs
from .backends.loading import load_backend
from .config import BackendName
from .preprocessing import ModelInput

Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)


class EngineInfo(NamedTuple):
    """What is known of an engine once it is loaded."""

    backend: str
    """As it is called on the command line."""
    device: Literal["cpu", "cuda"]
    """Where it computes."""
    concurrency: int
    """Threads that may call it at once, which is how batches overlap."""
    buckets: tuple[ShapeBucket, ...]
    """Input sizes of the items that it takes."""


class Engine(Protocol[Item, Result]):
    """Turns the items of a batch into results.

    Until it is loaded it is a mere description, which can be pickled. So can items and results.
    """

    def load(self) -> EngineInfo:
        """Load the model, before anything else is done.

        Raises:
            BundleError: the bundle is damaged or lacks the precision.
            BackendError: the backend does not run here, or not with such batches.
        """

    def warm_up(self, max_batch: int) -> None:
        """Compute batches, so that no request pays for what the first of a size costs."""

    def compute(self, items: Sequence[Item]) -> Sequence[Result]:
        """A result for each item of a batch, which are of one bucket.

        Arrays of the items do not outlive the call.
        """

    def close(self) -> None:
        """Release what it holds; it is not used after."""


class HostEngine:
    """Any backend: it takes images that the CPU prepared, and gives the model's outputs."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        precision: Precision,
        backend: BackendName,
        max_batch: int,
    ) -> None:
        """Describe what to load, in the terms of `load_backend`."""
        self._description = bundle, manifest, precision, backend, max_batch
        self._backend: Backend

    def load(self) -> EngineInfo:
        """Load the backend; raises as `load_backend` does."""
        self._backend = backend = load_backend(*self._description)
        return EngineInfo(backend.name, backend.device, backend.concurrency, backend.buckets)

    def warm_up(self, max_batch: int) -> None:
        """Warm the backend up."""
        self._backend.warm_up(max_batch)

    def compute(self, items: Sequence[ModelInput]) -> list[Outputs]:
        """The outputs for each image, as those of a batch of one."""
        pixels = np.stack([item.pixels for item in items])
        sizes = np.array([item.size for item in items], np.int64)
        outputs = self._backend.infer(items[0].bucket, pixels, sizes)
        return [
            Outputs._make(output[row : row + 1] for output in outputs) for row in range(len(items))
        ]

    def close(self) -> None:
        """Release the backend."""
        self._backend.close()

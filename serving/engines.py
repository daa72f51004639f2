"""What computes batches: the interface of it, and the engine of a bundle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from ..model.images import ImageError
from ..model.manifest import Manifest, Precision
from ..model.spec import ShapeBucket
from .backends.base import Backend, Outputs
from .backends.loading import load_backend
from .config import BackendName
from .detections import Answer
from .preprocessing import ModelInput
from .steps import Order

EngineItem = ModelInput | Order
EngineResult = Outputs | Answer[Any] | ImageError

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
    busy_from: int
    """Batches that keep it busy. With so many begun, only full ones still gain by beginning."""
    buckets: tuple[ShapeBucket, ...]
    """Input sizes of the items that it takes."""
    takes_orders: bool
    """Whether its items are orders and its results answers, which is when its device decodes images
    and encodes masks; else they are images that the CPU prepared, and the model's outputs for a
    batch of one."""


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


class _Batches(Protocol):
    """What a backend makes of the items of a batch."""

    @property
    def takes_orders(self) -> bool: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def busy_from(self) -> int: ...
    def warm_up(self, max_batch: int) -> None: ...
    def compute(self, items: Any) -> Sequence[EngineResult]: ...


class _InputBatches:
    """Images that the CPU prepared, for any backend."""

    takes_orders: ClassVar = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.concurrency = self.busy_from = backend.concurrency
        self.warm_up = backend.warm_up

    def compute(self, items: Sequence[ModelInput]) -> list[Outputs]:
        pixels = np.stack([item.pixels for item in items])
        sizes = np.array([item.size for item in items], np.int64)
        outputs = self._backend.infer(items[0].bucket, pixels, sizes)
        return [
            Outputs._make(output[row : row + 1] for output in outputs) for row in range(len(items))
        ]


class BundleEngine:
    """A bundle in one precision, on the backend that fits."""

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
        self._manifest = manifest
        self._backend: Backend
        self._batches: _Batches

    def load(self) -> EngineInfo:
        """Load the backend; raises as `load_backend` does."""
        self._backend = backend = load_backend(*self._description)
        self._batches = batches = _batches_of(backend, self._manifest)
        return EngineInfo(
            backend=backend.name,
            device=backend.device,
            concurrency=batches.concurrency,
            busy_from=batches.busy_from,
            buckets=backend.buckets,
            takes_orders=batches.takes_orders,
        )

    def warm_up(self, max_batch: int) -> None:
        """Compute batches of black images."""
        self._batches.warm_up(max_batch)

    def compute(self, items: Sequence[EngineItem]) -> Sequence[EngineResult]:
        """A result for each item of a batch."""
        return self._batches.compute(items)

    def close(self) -> None:
        """Release the backend."""
        self._backend.close()


def _batches_of(backend: Backend, manifest: Manifest) -> _Batches:
    if backend.name == "torch":
        from .backends.torch import TorchBackend
        from .device_engine import OrderBatches

        assert isinstance(backend, TorchBackend)
        return OrderBatches(backend, manifest)
    return _InputBatches(backend)

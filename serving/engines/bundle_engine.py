"""The engine of a bundle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from ...model.manifest import Manifest, Precision
from ..backends.base import Backend, Outputs
from ..backends.loading import load_backend
from ..config import BackendName
from ..steps.preprocessing import ModelInput
from .base import EngineInfo, EngineItem, EngineResult


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
        from ..backends.torch import TorchBackend
        from .device_engine import OrderBatches

        assert isinstance(backend, TorchBackend)
        return OrderBatches(backend, manifest)
    return _InputBatches(backend)

"""TensorRT and TensorRT-RTX: plans on the GPU, batches overlapping their copies."""

import functools
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...model.manifest import EngineKind, Manifest, Precision, verified_path
from ...model.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from .base import Outputs, black_batch, check_outputs
from .plan_checks import check_memory
from .plans import Plan, PlanRuntime
from .pycuda_device import BatchRunner, DeviceMemory, current_gpu, free_memory, synchronize
from .runtime_cache import RuntimeCache, cache_path

_DTYPES = (np.int64, np.float32, np.float32, np.int64, np.float32)
"""Of `Outputs`, whatever the plan's are."""


class TensorRTBackend:
    """One plan a shape bucket; while a batch computes, another is copied in or out."""

    device: Final = "cuda"
    concurrency = 2

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        precision: Precision,
        kind: EngineKind,
        max_batch: int,
    ) -> None:
        """Load the bundle's plans of a precision and kind, which `check_plans` has let pass.

        Raises:
            BundleError: the bundle has none, or one is missing or damaged.
            BackendError: one cannot be loaded or takes no such batch, or memory is short.
        """
        self.name = kind
        self._manifest = manifest
        artifacts = manifest.artifacts_for(precision, kind)
        self._cache = None
        if kind == "tensorrt-rtx":
            self._cache = RuntimeCache(cache_path(artifact.sha256 for artifact in artifacts))
        with current_gpu():
            runtime = PlanRuntime(kind, self._cache)
            self._plans = {
                artifact.bucket: Plan(runtime, verified_path(bundle, artifact), artifact, max_batch)
                for artifact in artifacts
            }
            self._reserve_memory()
            synchronize()

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes of the plans."""
        return tuple(self._plans)

    def warm_up(self, max_batch: int) -> None:
        """Run every bucket at each batch size that its plan is run at.

        Raises:
            BackendError: the runtime fails.
            BundleError: what comes out does not fit the manifest.
        """
        for bucket, plan in self._plans.items():
            for batch in plan.batches:
                images = black_batch(bucket, min(batch, max_batch))
                check_outputs(self.infer(bucket, *images), self._manifest)

    def infer(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> Outputs:
        """Detect in a batch [B, 3, H, W] of one bucket; `image_sizes` is [B, 2].

        Raises:
            BackendError: the runtime fails.
        """
        plan = self._plans[bucket]
        batch = plan.batch_for(len(images))
        inputs: dict[str, NDArray[Any]] = dict(zip(INPUT_NAMES, (images, image_sizes), strict=True))
        with current_gpu():
            outputs = self._batches.run(
                inputs, plan.specs(batch), functools.partial(plan.launch, batch)
            )
        rows = (outputs[name][: len(images)] for name in OUTPUT_NAMES)
        return Outputs(*(r.astype(t, copy=False) for r, t in zip(rows, _DTYPES, strict=True)))

    def close(self) -> None:
        """Release the GPU's memory, and keep what TensorRT-RTX compiled."""
        with current_gpu():
            if self._cache is not None:
                self._cache.store()
            self._plans.clear()
            del self._batches, self._scratch, self._cache

    def _reserve_memory(self) -> None:
        """Allocate what all plans share: scratch memory, and buffers for batches in flight."""
        plans = self._plans.values()
        scratch = max(plan.scratch_bytes for plan in plans)
        sizes: dict[str, int] = {}
        for spec_by_name in (plan.specs(batch) for plan in plans for batch in plan.batches):
            for name, spec in spec_by_name.items():
                sizes[name] = max(sizes.get(name, 0), spec.nbytes)
        check_memory(scratch + self.concurrency * sum(sizes.values()), free_memory())
        self._scratch = DeviceMemory(scratch)
        for plan in plans:
            plan.use_scratch(self._scratch.address, scratch)
        self._batches = BatchRunner(sizes, self.concurrency)

"""Backend for TensorRT and TensorRT-RTX. Copies of one batch overlap computation of another."""

import functools
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...model.bundle.manifest import EngineKind, Manifest, Precision, verified_path
from ...model.bundle.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from .base import HostOutputs, ModelOutputs, black_batch, check_outputs
from .plan_checks import check_memory
from .plans import Plan, PlanRuntime, RuntimeCache, cache_path
from .pycuda_device import BatchRunner, DeviceMemory, current_gpu, free_memory, synchronize

# Dtypes of `ModelOutputs`. A plan's own dtypes can differ.
_DTYPES = (np.int64, np.float32, np.float32, np.int64, np.float32)


class TensorRTBackend:
    """Backend with one plan per shape bucket."""

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
        """Load the bundle's plans of a precision and engine kind, which `check_plans` accepted.

        Raises:
            BundleError: the bundle has no such plan, or a file is missing or damaged.
            BackendError: a plan fails to load, lacks this batch size, or memory runs out.
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
        """Run every bucket at each batch size of its plan.

        Raises:
            BackendError: the runtime fails.
            BundleError: the masks do not have the shape that the manifest states.
        """
        for bucket, plan in self._plans.items():
            for batch in plan.batches:
                images = black_batch(bucket, min(batch, max_batch))
                check_outputs(self.infer(bucket, *images), self._manifest)

    def infer(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> HostOutputs:
        """Compute a batch [B, 3, H, W] of one bucket; `image_sizes` is [B, 2].

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
        return ModelOutputs(*(r.astype(t, copy=False) for r, t in zip(rows, _DTYPES, strict=True)))

    def close(self) -> None:
        """Release the GPU memory, and write TensorRT-RTX's compiled kernels to their cache file."""
        with current_gpu():
            if self._cache is not None:
                self._cache.store()
            self._plans.clear()
            del self._batches, self._scratch, self._cache

    def _reserve_memory(self) -> None:
        """Allocate GPU memory that all plans share: scratch, and buffers per in-flight batch."""
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

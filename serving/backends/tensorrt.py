"""Backend for TensorRT and TensorRT-RTX, for NumPy arrays and for torch tensors on the GPU.

A batch is copied while another one is computed.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ...model.bundle.manifest import Artifact, EngineKind, Manifest, Precision, verified_path
from ...model.bundle.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from ...model.resizing import Pixels
from .base import HostOutputs, ModelOutputs, TensorSpec, black_batch, check_outputs
from .gpu_execution import BatchRunner, LaunchGraphs, load_driver
from .plan_checks import check_memory, gpu_warning
from .tensorrt_plans import Plan, PlanRuntime, RuntimeCache, cache_path

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_log = logging.getLogger(__name__)

# Dtypes of `ModelOutputs`. A plan's own dtypes can differ.
OUTPUT_DTYPES = (np.int64, np.float32, np.float32, np.int64, np.float32)


class TensorRTBackend:
    """Backend that runs one plan of TensorRT or TensorRT-RTX per shape bucket (input size).

    With TensorRT, but not with TensorRT-RTX, batches run as CUDA graphs. A graph contains the GPU
    addresses of buffers, and each batch in flight has its own buffers. Therefore there is one graph
    per bucket, batch size and set of buffers.
    """

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
        """Load the bundle's plans of a precision and engine kind.

        The caller must first check with `check_plans` that the plans run on this machine.

        Raises:
            BundleError: the bundle has no plan of this precision and kind, or a plan's file is
                missing or damaged.
            BackendError: a plan fails to load or does not support batches of `max_batch` images, or
                memory runs out.
        """
        self.name: EngineKind = kind
        self._manifest = manifest
        artifacts = manifest.artifacts_for(precision, kind)
        self._cache = None
        if kind == "tensorrt-rtx":
            self._cache = RuntimeCache(cache_path(artifact.sha256 for artifact in artifacts))
        self._driver = load_driver()
        # TensorRT-RTX replaces kernels by faster ones while it runs. A graph would keep the old
        # ones, so TensorRT-RTX runs without graphs.
        self._graphs = LaunchGraphs() if kind == "tensorrt" else None
        self._plans: dict[ShapeBucket, Plan] = {}
        # `resources` releases TensorRT's objects and memory in reverse order. Close it only while
        # the CUDA context is current.
        with self._driver.current(), ExitStack() as resources:
            if self._cache is not None:
                resources.callback(self._cache.close)
            resources.callback(self._plans.clear)
            try:
                self._load_plans(bundle, artifacts, max_batch)
                self._reserve_memory(resources)
                self._driver.synchronize()
            except Exception as error:
                # The local variables in the traceback's frames would keep TensorRT's objects alive.
                clear_frames(error.__traceback__)
                raise
            self._resources = resources.pop_all()

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes of the plans."""
        return tuple(self._plans)

    def warm_up(self, max_batch: int) -> None:
        """Run each plan on black images, with each of its batch sizes.

        For a batch size above `max_batch`, `max_batch` images are padded to this size. With
        TensorRT, but not with TensorRT-RTX, these runs capture the CUDA graphs. The method
        raises the same errors as `infer`.
        """
        for bucket, plan in self._plans.items():
            for batch in plan.batches:
                images = black_batch(bucket, min(batch, max_batch))
                # Successive batches use the sets of buffers in turn. Each set needs two runs: the
                # first captures the CUDA graph. The second replays it for the first time, which is
                # slower than later replays.
                for _ in range(2 * self.concurrency):
                    self.infer(bucket, *images)

    def infer(
        self, bucket: ShapeBucket, images: Pixels, image_sizes: NDArray[np.int64]
    ) -> HostOutputs:
        """Run the model on images [B, 3, H, W] that are padded to the input size `bucket`.

        `image_sizes` [B, 2] are the images' heights and widths before padding. The method
        returns the model's outputs for the B images as NumPy arrays.

        Raises:
            BackendError: the batch exceeds the plan's largest batch size, or TensorRT fails.
            BundleError: the output masks do not have the shape that the bundle's manifest states.
        """
        plan = self._plans[bucket]
        batch = plan.batch_for(len(images))
        inputs: dict[str, NDArray[Any]] = dict(zip(INPUT_NAMES, (images, image_sizes), strict=True))

        def launch(addresses: Mapping[str, int], stream: int) -> None:
            self._launch(bucket, batch, addresses, stream)

        with self._driver.current():
            results = self._batches.run(inputs, plan.specs(batch), launch)
        rows = (results[name][: len(images)] for name in OUTPUT_NAMES)
        outputs = ModelOutputs(
            *(r.astype(t, copy=False) for r, t in zip(rows, OUTPUT_DTYPES, strict=True))
        )
        check_outputs(outputs, self._manifest)
        return outputs

    def close(self) -> None:
        """Release the GPU memory, and write TensorRT-RTX's compiled kernels to their cache file."""
        with self._driver.current():
            if self._cache is not None:
                self._cache.store()
            self._resources.close()

    def _launch(
        self, bucket: ShapeBucket, batch: int, addresses: Mapping[str, int], stream: int
    ) -> None:
        def queue() -> None:
            self._plans[bucket].launch(batch, addresses, stream)

        if self._graphs is None:
            queue()
        else:
            self._graphs.launch((bucket, batch, *addresses.values()), stream, queue)

    def _load_plans(self, bundle: Path, artifacts: Sequence[Artifact], max_batch: int) -> None:
        runtime = PlanRuntime(self.name, self._cache)
        for artifact in artifacts:
            if warning := gpu_warning(artifact, self._driver.gpu_name()):
                _log.warning("%s", warning)
            path = verified_path(bundle, artifact)
            self._plans[artifact.bucket] = Plan(runtime, path, artifact, max_batch)

    def _reserve_memory(self, resources: ExitStack) -> None:
        """Allocate the GPU memory that all plans share: scratch memory, and input/output buffers.

        The memory is released when the ExitStack `resources` is closed.
        """
        plans = self._plans.values()
        scratch = max(plan.scratch_bytes for plan in plans)
        sizes: dict[str, int] = {}
        for spec_by_name in (plan.specs(batch) for plan in plans for batch in plan.batches):
            for name, spec in spec_by_name.items():
                sizes[name] = max(sizes.get(name, 0), spec.nbytes)
        # One set of buffers per batch in flight, and one more, which `TensorRTDeviceBackend`
        # allocates for torch tensors.
        needed = scratch + (self.concurrency + 1) * sum(sizes.values())
        check_memory(needed, self._driver.free_memory())
        memory = resources.enter_context(closing(self._driver.new_memory(scratch)))
        # Release the plans before `memory`, because their execution contexts use `memory`.
        resources.callback(self._plans.clear)
        for plan in plans:
            plan.use_scratch(memory.address, scratch)
        self._allocate(sizes, resources)
        if self._graphs is not None:
            resources.callback(self._graphs.close)
            resources.callback(self._driver.synchronize)

    def _allocate(self, sizes: Mapping[str, int], resources: ExitStack) -> None:
        """Allocate input and output buffers, which the ExitStack `resources` releases on close.

        `sizes` are the buffer sizes in bytes, by tensor name.
        """
        runner = BatchRunner(self._driver, sizes, self.concurrency)
        self._batches = resources.enter_context(closing(runner))


class TensorRTDeviceBackend(TensorRTBackend):
    """TensorRT backend whose method `infer_on_device` takes batches of torch tensors on GPU 0."""

    # The methods import torch lazily, because `TensorRTBackend` must run without it.

    def warm_up(self, max_batch: int) -> None:
        """Run each plan on black images, with each of its batch sizes.

        For a batch size above `max_batch`, `max_batch` images are padded to this size. With
        TensorRT, but not with TensorRT-RTX, these runs capture the CUDA graphs. The method
        raises the same errors as `infer_on_device`.
        """
        import torch

        for bucket, plan in self._plans.items():
            for batch in plan.batches:
                arrays = black_batch(bucket, min(batch, max_batch))
                images, sizes = (torch.from_numpy(array).cuda() for array in arrays)
                # The first run captures the CUDA graph. The second replays it for the first time,
                # which is slower than later replays.
                for _ in range(2):
                    self.infer_on_device(bucket, images, sizes)
                torch.cuda.current_stream().synchronize()

    def infer_on_device(
        self, bucket: ShapeBucket, images: "Tensor", image_sizes: "Tensor"
    ) -> "ModelOutputs[Tensor]":
        """Queue a batch on the backend's CUDA stream. Make torch's current stream wait for it.

        Thread-safe. The backend's stream computes the batches of all plans.

        Args:
            bucket: One of `buckets`.
            images: [B, 3, bucket.height, bucket.width] RGB in 0..255, uint8 or float32, on the
                GPU. They are converted to the plan's dtype.
            image_sizes: [B, 2] int64 on the GPU, height and width before padding.

        Returns:
            New tensors on the GPU, valid once torch's current stream has run the queued work.

        Raises:
            BackendError: the batch exceeds the plan's largest batch size, or TensorRT fails.
            BundleError: the output masks do not have the shape that the bundle's manifest states.
        """
        import torch

        plan, count = self._plans[bucket], len(images)
        batch = plan.batch_for(count)
        current = torch.cuda.current_stream()
        # All batches share the plans' scratch memory, so one stream computes them.
        with self._driver.current(), self._batches.computing() as handle:
            stream = torch.cuda.ExternalStream(handle)  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                tensors = {name: self._tensor(name, s) for name, s in plan.specs(batch).items()}
                for name, given in zip(INPUT_NAMES, (images, image_sizes), strict=True):
                    tensors[name][:count].copy_(given)
                # A CUDA graph contains these addresses. They are the same for each batch, because
                # all batches use the same memory.
                addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
                self._launch(bucket, batch, addresses, handle)
                copies = (
                    tensors[name][:count].to(_torch_dtype(dtype), copy=True)
                    for name, dtype in zip(OUTPUT_NAMES, OUTPUT_DTYPES, strict=True)
                )
                outputs = ModelOutputs(*copies)
            current.wait_stream(stream)
        check_outputs(outputs, self._manifest)
        return outputs

    def _allocate(self, sizes: Mapping[str, int], resources: ExitStack) -> None:
        import torch

        super()._allocate(sizes, resources)
        self._memory = {
            name: torch.zeros(size, dtype=torch.uint8, device="cuda")
            for name, size in sizes.items()
        }
        resources.callback(torch.cuda.empty_cache)
        resources.callback(self._memory.clear)

    def _tensor(self, name: str, spec: TensorSpec) -> "Tensor":
        flat = self._memory[name][: spec.nbytes].view(_torch_dtype(spec.dtype))
        return flat.reshape(spec.shape)


def _torch_dtype(dtype: Any) -> "torch.dtype":
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype

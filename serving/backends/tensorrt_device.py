"""TensorRT backend that takes NumPy arrays, and also torch tensors that are on the GPU."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...model.bundle.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from .base import ModelOutputs, TensorSpec, black_batch, check_outputs
from .tensorrt import OUTPUT_DTYPES, TensorRTBackend


class TensorRTDeviceBackend(TensorRTBackend):
    """TensorRT backend whose method `infer_on_device` takes batches of torch tensors on GPU 0."""

    def warm_up(self, max_batch: int) -> None:
        """Run each plan with each of its batch sizes; sizes above `max_batch` are reduced to it.

        With TensorRT, but not with TensorRT-RTX, these runs capture the CUDA graphs. The method
        raises the same errors as `infer_on_device`.
        """
        for bucket, plan in self._plans.items():
            for batch in plan.batches:
                arrays = black_batch(bucket, min(batch, max_batch))
                images, sizes = (torch.from_numpy(array).cuda() for array in arrays)
                # One run that is captured, and the first replay, which is slower than later ones.
                for _ in range(2):
                    self.infer_on_device(bucket, images, sizes)
                torch.cuda.current_stream().synchronize()

    def infer_on_device(
        self, bucket: ShapeBucket, images: Tensor, image_sizes: Tensor
    ) -> ModelOutputs[Tensor]:
        """Queue a batch, and make torch's current CUDA stream wait for it. Thread-safe.

        One CUDA stream of the backend computes the batches of all plans.

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
                # CUDA graphs and plans refer to addresses, so the memory is the same each time.
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
        super()._allocate(sizes, resources)
        self._memory = {
            name: torch.zeros(size, dtype=torch.uint8, device="cuda")
            for name, size in sizes.items()
        }
        resources.callback(torch.cuda.empty_cache)
        resources.callback(self._memory.clear)

    def _tensor(self, name: str, spec: TensorSpec) -> Tensor:
        flat = self._memory[name][: spec.nbytes].view(_torch_dtype(spec.dtype))
        return flat.reshape(spec.shape)


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype

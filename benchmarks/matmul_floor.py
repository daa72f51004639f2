"""The least time that the model's multiplications take on a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..model.config import ModelConfig
from ..model.manifest import Precision
from ..model.mask_rcnn import MaskRCNN
from ..model.spec import ShapeBucket
from .timing import calls_per_second, durations_of

SIDE = 8192
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MatmulFloor:
    """What the GPU would reach if nothing but multiplications took time."""

    precision: Precision
    teraflops_per_second: float
    """Of a product of two large square matrices."""
    flops_per_image: int
    """Of the model's convolutions and matrix products, two a multiplication and addition."""

    @property
    def images_per_second(self) -> float:
        """Upper bound of the throughput."""
        return 1e12 * self.teraflops_per_second / self.flops_per_image


def floors_of(
    precisions: Sequence[Precision], config: ModelConfig, bucket: ShapeBucket
) -> Iterator[MatmulFloor]:
    """The floor of a model in several precisions on the current GPU; none where torch has none."""
    if not torch.cuda.is_available():
        return
    flops = flops_per_image(config, bucket)
    for precision in precisions:
        yield MatmulFloor(precision, matmul_teraflops(precision, SIDE, "cuda"), flops)


def flops_per_image(config: ModelConfig, bucket: ShapeBucket) -> int:
    """Floating-point operations of convolutions and matrix products for one image of a size.

    Nothing is computed. What lies between them is not counted: the project's own operations,
    element-wise ones, sorting.
    """
    with torch.device("meta"):
        model = MaskRCNN(config).eval()
        images = torch.empty(1, 3, *bucket, dtype=torch.uint8)
        sizes = torch.empty(1, 2, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.detect(images, sizes)
    flops: int = counter.get_total_flops()
    return flops


def matmul_teraflops(precision: Precision, side: int, device: str, seconds: float = 0.5) -> float:
    """Rate of the product of two matrices [side, side], in 10^12 operations a second.

    Args:
        precision: Arithmetic; `tf32` and `fp32` set what torch is allowed in this process.
        side: Rows and columns.
        device: `cuda` or `cpu`.
        seconds: Time to measure for, after as long a warm-up.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = _DTYPES.get(precision, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def complete() -> None:
        multiply()
        wait()

    count = len(durations_of(complete, seconds))
    return 2 * side**3 * calls_per_second(multiply, wait, count) / 1e12

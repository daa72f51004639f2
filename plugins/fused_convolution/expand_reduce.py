"""`maskrcnn::expand_reduce`: a residual block's last convolution, and the next block's first."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .operation import empty_pointwise_output

# Maximum numbers of channels between the two convolutions, and after the second one. With more
# channels, two kernels are faster than one.
_MAX_CHANNELS, _MAX_REDUCED = 512, 128


def can_expand_reduce(weight: Tensor, next_weight: Tensor) -> bool:
    """Return whether `expand_reduce` supports these weights, and is faster than two convolutions.

    `weight` [N, C, 1, 1] belongs to the first convolution, `next_weight` [M, N, 1, 1] to the second
    one.
    """
    sizes = (weight.shape[1], *next_weight.shape[:2])
    powers = all(size >= 64 and size & (size - 1) == 0 for size in sizes)
    return powers and sizes[2] <= _MAX_CHANNELS and sizes[1] <= _MAX_REDUCED


@torch.library.triton_op("maskrcnn::expand_reduce", mutates_args=())
def expand_reduce(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    next_weight: Tensor,
    next_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute two successive 1x1 convolutions, each with a ReLU. The first adds a residual map.

    Args:
        images: [B, C, H, W], input of the first convolution; on a GPU float16 or bfloat16.
        weight: [N, C, 1, 1], weight of the first convolution. `can_expand_reduce` tests whether the
            shapes of both weights are supported.
        bias: [N], bias of the first convolution.
        residual: [B, N, H, W], added before the first ReLU.
        next_weight: [M, N, 1, 1], weight of the second convolution.
        next_bias: [M], bias of the second convolution.

    Returns:
        results [B, N, H, W] and [B, M, H, W] of the first and the second convolution, on a GPU
        channels-last.
    """
    from .expand_reduce_kernel import launch_expand_reduce

    output, reduced = (empty_pointwise_output(images, own) for own in (weight, next_weight))
    launch_expand_reduce(images, weight, bias, residual, next_weight, next_bias, output, reduced)
    return output, reduced


@expand_reduce.register_kernel("cpu")  # type: ignore[untyped-decorator]
def _(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    next_weight: Tensor,
    next_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    output = (F.conv2d(images, weight, bias) + residual).relu()
    return output, F.conv2d(output, next_weight, next_bias).relu()

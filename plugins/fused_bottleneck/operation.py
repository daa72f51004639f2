"""`maskrcnn::fused_bottleneck`: transition between two residual blocks with few channels.

Contract of all implementations: the sum of the last convolution of a residual block and of its
shortcut passes a ReLU, and is rounded. The first convolution of the next block, with a ReLU, reads
the rounded values.
"""

# In the first stage of a ResNet-50 or larger, memory traffic determines how long these layers take.
# Unlike in separate kernels, the sum is not read back, and the shortcut's result is not written.

import torch
from torch import Tensor
from torch.nn import functional as F

from ..fused_convolution import expand_reduce, pointwise_convolution
from ..fused_convolution.expand_reduce import can_fuse
from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import (
    CHUNK,
    fits_shared_memory,
    fused_bottleneck_kernel,
    fused_bottleneck_launch,
)

_VALUE_TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Lowest compute capability with enough shared memory for the kernel.
_CAPABILITY = (9, 0)


def can_fuse_bottleneck(
    weight: Tensor, shortcut_weight: Tensor | None, next_weight: Tensor
) -> bool:
    """Return whether `fused_bottleneck` supports weights, which are those of its arguments."""
    shortcut = 0 if shortcut_weight is None else shortcut_weight.shape[1]
    outputs, channels = weight.shape[:2]
    sizes = channels, shortcut, outputs, next_weight.shape[0]
    divisible = all(size % CHUNK == 0 for size in sizes)
    # On older GPUs, `expand_reduce` is used.
    return divisible and fits_shared_memory(*sizes) and can_fuse(weight, next_weight)


@torch.library.custom_op("maskrcnn::fused_bottleneck", mutates_args=(), device_types="cpu")
def fused_bottleneck(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor,
    shortcut_weight: Tensor | None,
    shortcut_bias: Tensor | None,
    next_weight: Tensor,
    next_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the output of a residual block, and the first convolution of the next block.

    All convolutions are 1x1. The operation has no gradient.

    Args:
        images: [B, C, H, W], input of the block's last convolution; on a GPU float16 or bfloat16.
        weight: [N, C, 1, 1], weight of the last convolution. `can_fuse_bottleneck` tests whether
            the numbers of channels are supported.
        bias: [N].
        shortcut: [B, N, H, W], which is added; with a `shortcut_weight`, [B, S, H, W].
        shortcut_weight: [N, S, 1, 1], weight of a convolution in the shortcut. None: there is none.
        shortcut_bias: [N], bias of that convolution.
        next_weight: [M, N, 1, 1], weight of the next block's first convolution.
        next_bias: [M].

    Returns:
        the block's output [B, N, H, W], and the result of the next block's first convolution,
        [B, M, H, W], on a GPU channels-last.
    """
    if shortcut_weight is not None:
        shortcut = F.conv2d(shortcut, shortcut_weight, shortcut_bias)
    output = (F.conv2d(images, weight, bias) + shortcut).relu()
    return output, F.conv2d(output, next_weight, next_bias).relu()


@fused_bottleneck.register_fake
def _(images: Tensor, weight: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
    next_weight = others[-2]
    assert next_weight is not None
    return _empty_outputs(images, weight, next_weight)


@fused_bottleneck.register_kernel("cuda")
def _(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor,
    shortcut_weight: Tensor | None,
    shortcut_bias: Tensor | None,
    next_weight: Tensor,
    next_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    if torch.cuda.get_device_capability(images.device) < _CAPABILITY:
        if shortcut_weight is not None:
            assert shortcut_bias is not None
            shortcut = pointwise_convolution(
                shortcut, shortcut_weight, shortcut_bias, None, 1, False
            )
        results: tuple[Tensor, Tensor] = expand_reduce(
            images, weight, bias, shortcut, next_weight, next_bias
        )
        return results
    batch, channels, rows, columns = images.shape
    outputs, reduced = weight.shape[0], next_weight.shape[0]
    if shortcut_weight is None or shortcut_bias is None:
        shortcut_weight, shortcut_bias = weight[:, :0], bias[:0]
    read = shortcut_weight.shape[1]
    arguments = {
        "images": (images.permute(0, 2, 3, 1), (batch, rows, columns, channels)),
        "weight": (weight.flatten(1), (outputs, channels)),
        "bias": (bias, (outputs,)),
        "shortcut": (shortcut.permute(0, 2, 3, 1), (batch, rows, columns, read or outputs)),
        "shortcut_weight": (shortcut_weight.flatten(1), (outputs, read)),
        "shortcut_bias": (shortcut_bias, (outputs if read else 0,)),
        "next_weight": (next_weight.flatten(1), (reduced, outputs)),
        "next_bias": (next_bias, (reduced,)),
    }
    inputs = [
        kernel_argument(name, tensor, images.dtype, shape)
        for name, (tensor, shape) in arguments.items()
    ]
    results = _empty_outputs(images, weight, next_weight)
    sizes = channels, read, outputs, reduced
    multiprocessors = torch.cuda.get_device_properties(images.device).multi_processor_count
    launch_kernel(
        fused_bottleneck_kernel(_VALUE_TYPES[images.dtype], *sizes),
        fused_bottleneck_launch(batch * rows * columns, multiprocessors),
        inputs,
        results,
    )
    return results


def _empty_outputs(images: Tensor, weight: Tensor, next_weight: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, rows, columns = images.shape
    output, reduced = (
        images.new_empty(batch, rows, columns, own.shape[0]).permute(0, 3, 1, 2)
        for own in (weight, next_weight)
    )
    return output, reduced

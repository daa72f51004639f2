"""`maskrcnn::block_transition`: fused end of a residual block and start of the next one.

Specification of all implementations: the result of a residual block's last convolution and the
block's shortcut are added. A ReLU is applied to the sum, and the result is rounded to the data type
of the tensors. The first convolution of the next block reads the rounded values. A ReLU is applied
to its result, too. The CUDA kernel keeps all weights in shared memory, so the operation supports
only blocks with few channels. `can_fuse_transition` tests whether a block is supported.
"""

# In the first stage of a ResNet-50 or larger, memory traffic determines how long these layers take.
# Unlike in separate kernels, the sum is not read back, and the shortcut's result is not written.

import torch
from torch import Tensor
from torch.nn import functional as F

from ..fused_convolution import expand_reduce, gemm_convolution
from ..fused_convolution.expand_reduce import can_expand_reduce
from ..fused_convolution.operation import empty_pointwise_output
from ..runtime.arguments import HALF_TYPES, kernel_argument
from ..runtime.launching import launch_kernel, shared_memory_limit
from .kernel import (
    CHUNK,
    block_transition_kernel,
    block_transition_launch,
    fits_shared_memory,
)

# Lowest compute capability on which the kernel was measured. On GPUs of lower capability, or with
# too little shared memory, `expand_reduce` is used.
_CAPABILITY = (9, 0)


def can_fuse_transition(
    weight: Tensor, shortcut_weight: Tensor | None, next_weight: Tensor
) -> bool:
    """Return whether `block_transition` supports weights of these shapes.

    `weight` [N, C, 1, 1] belongs to a residual block's last convolution, `next_weight`
    [M, N, 1, 1] to the next block's first convolution, and `shortcut_weight` [N, S, 1, 1] to the
    shortcut's convolution. None: the shortcut has no convolution.
    """
    shortcut = 0 if shortcut_weight is None else shortcut_weight.shape[1]
    outputs, channels = weight.shape[:2]
    sizes = channels, shortcut, outputs, next_weight.shape[0]
    divisible = all(size % CHUNK == 0 for size in sizes)
    return divisible and fits_shared_memory(*sizes) and can_expand_reduce(weight, next_weight)


@torch.library.custom_op("maskrcnn::block_transition", mutates_args=(), device_types="cpu")
def block_transition(
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

    All convolutions are 1x1. A ReLU is applied to both results. The operation has no gradient.

    Args:
        images: [B, C, H, W], input of the block's last convolution; on a GPU float16 or bfloat16.
        weight: [N, C, 1, 1], weight of the last convolution. `can_fuse_transition` tests whether
            the numbers of channels are supported.
        bias: [N], bias of the last convolution.
        shortcut: [B, N, H, W], added to the last convolution's result. With a `shortcut_weight`:
            [B, S, H, W], input of the shortcut's convolution.
        shortcut_weight: [N, S, 1, 1], weight of the shortcut's convolution. None: the shortcut has
            no convolution.
        shortcut_bias: [N], bias of the shortcut's convolution. On a GPU, it is required with a
            `shortcut_weight`, and must be None without one.
        next_weight: [M, N, 1, 1], weight of the next block's first convolution.
        next_bias: [M], bias of the next block's first convolution.

    Returns:
        the block's output [B, N, H, W], and the result of the next block's first convolution,
        [B, M, H, W]. On a GPU both are channels-last.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape than documented, or only one of
            `shortcut_weight` and `shortcut_bias` is given.
    """
    if shortcut_weight is not None:
        shortcut = F.conv2d(shortcut, shortcut_weight, shortcut_bias)
    output = (F.conv2d(images, weight, bias) + shortcut).relu()
    return output, F.conv2d(output, next_weight, next_bias).relu()


@block_transition.register_fake
def _(images: Tensor, weight: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
    next_weight = others[-2]
    assert next_weight is not None
    return _empty_outputs(images, weight, next_weight)


@block_transition.register_kernel("cuda")
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
    value_type = HALF_TYPES.get(images.dtype)
    if value_type is None:
        raise ValueError(f"images must be float16 or bfloat16, not {images.dtype}")
    if (shortcut_weight is None) != (shortcut_bias is None):
        raise ValueError("shortcut_weight and shortcut_bias go together; give both or neither")
    batch, channels, rows, columns = images.shape
    outputs, reduced = weight.shape[0], next_weight.shape[0]
    shortcut_channels = 0 if shortcut_weight is None else shortcut_weight.shape[1]
    kernel = block_transition_kernel(value_type, channels, shortcut_channels, outputs, reduced)
    properties = torch.cuda.get_device_properties(images.device)
    too_large = kernel.shared_memory > shared_memory_limit(images.device)
    if (properties.major, properties.minor) < _CAPABILITY or too_large:
        with torch.cuda.device(images.device):
            if shortcut_weight is not None and shortcut_bias is not None:
                shortcut = gemm_convolution(shortcut, shortcut_weight, shortcut_bias, None, False)
            arguments = images, weight, bias, shortcut, next_weight, next_bias
            separate: tuple[Tensor, Tensor] = expand_reduce(*arguments)
        return separate
    if shortcut_weight is None or shortcut_bias is None:
        shortcut_weight, shortcut_bias = weight[:, :0], bias[:0]
    named = {
        "images": (images.permute(0, 2, 3, 1), (batch, rows, columns, channels)),
        "weight": (weight.flatten(1), (outputs, channels)),
        "bias": (bias, (outputs,)),
        "shortcut": (
            shortcut.permute(0, 2, 3, 1),
            (batch, rows, columns, shortcut_channels or outputs),
        ),
        "shortcut_weight": (shortcut_weight.flatten(1), (outputs, shortcut_channels)),
        "shortcut_bias": (shortcut_bias, (outputs if shortcut_channels else 0,)),
        "next_weight": (next_weight.flatten(1), (reduced, outputs)),
        "next_bias": (next_bias, (reduced,)),
    }
    inputs = [
        kernel_argument(name, tensor, images.dtype, shape)
        for name, (tensor, shape) in named.items()
    ]
    results = _empty_outputs(images, weight, next_weight)
    launch_kernel(
        kernel,
        block_transition_launch(batch * rows * columns, properties.multi_processor_count),
        inputs,
        results,
    )
    return results


def _empty_outputs(images: Tensor, weight: Tensor, next_weight: Tensor) -> tuple[Tensor, Tensor]:
    return empty_pointwise_output(images, weight), empty_pointwise_output(images, next_weight)

"""`maskrcnn::block_transition`: fused end of a residual block and start of the next one.

Specification of all implementations: the result of a residual block's last convolution and the
block's shortcut are added. A ReLU is applied to the sum, and the result is rounded to the data type
of the tensors. The first convolution of the next block reads the rounded values. A ReLU is applied
to its result, too. `can_fuse_transition` tests whether a block is supported.
"""

# In the first stages of a ResNet-50 or larger, memory traffic limits the speed of these layers.
# Unlike separate kernels, the fused kernel neither reads the sum back nor writes the shortcut's
# result.

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime.arguments import HALF_TYPES, kernel_argument
from ..runtime.launching import common_device
from .fastest import run_fastest
from .library_operations import gemm_convolution
from .operation import empty_pointwise_output, pixel_matrix

# Minimum number of channels of each map.
_MIN_CHANNELS = 64
# Maximum numbers of channels. With more channels, separate kernels are faster, or the fused kernel
# needs too much shared memory.
_MAX_INPUTS = 128  # inputs of the last convolution, and of the shortcut's
_MAX_OUTPUTS = 512  # outputs of the residual block
_MAX_REDUCED = 256  # outputs of the next block's first convolution
_MAX_REDUCED_WITH_SHORTCUT = 128  # the same outputs, if the shortcut has a convolution

# Compute capability on which the fused kernel was always faster than separate kernels. There, the
# separate kernels are not measured.
_MEASURED_CAPABILITY = (9, 0)


def can_fuse_transition(
    weight: Tensor, shortcut_weight: Tensor | None, next_weight: Tensor
) -> bool:
    """Return whether `block_transition` supports weights of these shapes.

    `weight` [N, C, 1, 1] belongs to a residual block's last convolution, `next_weight`
    [M, N, 1, 1] to the next block's first convolution, and `shortcut_weight` [N, S, 1, 1] to the
    shortcut's convolution. None: the shortcut has no convolution.
    """
    (outputs, *inputs), reduced = weight.shape[:2], next_weight.shape[0]
    limit = _MAX_REDUCED
    if shortcut_weight is not None:
        inputs.append(shortcut_weight.shape[1])
        limit = _MAX_REDUCED_WITH_SHORTCUT
    sizes = [*inputs, outputs, reduced]
    powers = all(size >= _MIN_CHANNELS and size & (size - 1) == 0 for size in sizes)
    few = max(inputs) <= _MAX_INPUTS and outputs <= _MAX_OUTPUTS and reduced <= limit
    return powers and few


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

    On a GPU, the first call with new shapes measures launch parameters of the fused kernel. If the
    GPU's compute capability is not 9.0, the call also measures separate convolutions. This process
    and later ones use the fastest implementation.

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
        ValueError: on a GPU, an argument has another dtype or shape than documented, the arguments
            are on several devices, or only one of `shortcut_weight` and `shortcut_bias` is given.
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
    from .block_transition_kernel import Blocks, fastest_blocks, launch_block_transition

    if images.dtype not in HALF_TYPES:
        raise ValueError(f"images must be float16 or bfloat16, not {images.dtype}")
    if (shortcut_weight is None) != (shortcut_bias is None):
        raise ValueError("shortcut_weight and shortcut_bias go together; give both or neither")
    inputs = {
        "images": images,
        "weight": weight,
        "bias": bias,
        "shortcut": shortcut,
        "next_weight": next_weight,
        "next_bias": next_bias,
    }
    if shortcut_weight is not None and shortcut_bias is not None:
        inputs |= {"shortcut_weight": shortcut_weight, "shortcut_bias": shortcut_bias}
    matrices = _matrices(inputs)
    if images.numel() == 0:
        return _empty_outputs(images, weight, next_weight)

    def fused(blocks: Blocks) -> tuple[Tensor, Tensor]:
        output, reduced = _empty_outputs(images, weight, next_weight)
        outputs = {"output": pixel_matrix(output), "reduced": pixel_matrix(reduced)}
        launch_block_transition({**matrices, **outputs}, blocks)
        return output, reduced

    def separate() -> tuple[Tensor, Tensor]:
        residual = shortcut
        if shortcut_weight is not None and shortcut_bias is not None:
            residual = gemm_convolution(shortcut, shortcut_weight, shortcut_bias, None, False)
        output = gemm_convolution(images, weight, bias, residual, True)
        return output, gemm_convolution(output, next_weight, next_bias, None, True)

    candidates = fastest_blocks(matrices)
    implementations: list[Callable[[], tuple[Tensor, Tensor]]] = [
        partial(fused, blocks) for blocks in candidates
    ]
    if torch.cuda.get_device_capability(images.device) != _MEASURED_CAPABILITY:
        implementations.append(separate)
    shapes = [(name, tuple(matrix.shape)) for name, matrix in matrices.items()]
    key = "block_transition", images.dtype, shapes, candidates
    with torch.cuda.device(images.device):
        return run_fastest(key, implementations)


def _empty_outputs(images: Tensor, weight: Tensor, next_weight: Tensor) -> tuple[Tensor, Tensor]:
    return empty_pointwise_output(images, weight), empty_pointwise_output(images, next_weight)


def _matrices(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check the inputs of `block_transition`, and return maps as [pixels, channels].

    Weights are returned as [output channels, input channels]. All results are contiguous and
    aligned.

    Raises:
        ValueError: a tensor has another dtype or shape than documented, or the tensors are on
            several devices.
    """
    images = inputs["images"]
    batch, channels, rows, columns = images.shape
    outputs, reduced = len(inputs["weight"]), len(inputs["next_weight"])
    shortcut = inputs["shortcut_weight"].shape[1] if "shortcut_weight" in inputs else outputs
    shapes = {
        "images": (batch, rows, columns, channels),
        "weight": (outputs, channels, 1, 1),
        "bias": (outputs,),
        "shortcut": (batch, rows, columns, shortcut),
        "shortcut_weight": (outputs, shortcut, 1, 1),
        "shortcut_bias": (outputs,),
        "next_weight": (reduced, outputs, 1, 1),
        "next_bias": (reduced,),
    }
    common_device("block_transition", inputs.values())
    matrices = {}
    for name, tensor in inputs.items():
        is_map = name in ("images", "shortcut")
        matrix = tensor.permute(0, 2, 3, 1) if is_map else tensor
        matrix = kernel_argument(name, matrix, images.dtype, shapes[name])
        if matrix.dim() == 4:
            matrix = matrix.flatten(0, 2) if is_map else matrix.flatten(1)
        matrices[name] = matrix
    return matrices

"""`maskrcnn::block_transition`: fused end of a residual block and start of the next one.

Specification of all implementations: the steps are, in this order,

1. optionally, the residual block's middle convolution and a ReLU;
2. the sum of the block's last convolution and the block's shortcut, and a ReLU;
3. the next block's first convolution and a ReLU.

The result of each step is rounded to the dtype of the tensors, and the next step reads the rounded
values. `can_fuse_transition` tests whether a block is supported, and `can_fuse_middle` whether its
middle convolution is supported.
"""

# In the first stages of a ResNet-50 or larger, memory traffic limits the speed of these layers.
# Unlike separate kernels, the fused kernel neither reads the sum back nor writes the results of the
# shortcut's and of the middle convolution.

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime.arguments import HALF_TYPES, aligned, check_argument
from ..runtime.launching import common_device
from .fastest import run_fastest
from .library_operations import cudnn_convolution, gemm_convolution
from .operation import empty_pointwise_output

# Minimum number of channels of each map.
_MIN_CHANNELS = 64
# Maximum numbers of channels. With more channels, separate kernels are faster, or the fused kernel
# needs too much shared memory.
_MAX_INPUTS = 128  # inputs of the last convolution, and of the shortcut's
_MAX_OUTPUTS = 512  # outputs of the residual block
_MAX_REDUCED = 256  # outputs of the next block's first convolution
_MAX_REDUCED_WITH_SHORTCUT = 128  # the same outputs, if the shortcut has a convolution
# Shapes of the weights of middle convolutions that can be fused.
_MIDDLE_SHAPES = (64, 64, 3, 3), (128, 128, 3, 3)
# Maximum number of channels of a middle convolution with which the fused kernel is always faster on
# `_MEASURED_CAPABILITY`.
_FASTER_MIDDLE = 64

# Compute capability on which the fused kernel was always faster than separate kernels. Separate
# kernels are not measured on it, unless there is a middle convolution of many channels.
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


def can_fuse_middle(weight: Tensor) -> bool:
    """Return whether `block_transition` supports a middle convolution with a weight of this shape.

    `weight` is [C, C, K, K]. The convolution must have stride 1 and keep the height and width.
    """
    return tuple(weight.shape) in _MIDDLE_SHAPES


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
    middle_weight: Tensor | None = None,
    middle_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the output of a residual block, and the first convolution of the next block.

    The middle convolution is 3x3, all others are 1x1. A ReLU is applied to all results but that of
    the shortcut's convolution. The operation has no gradient.

    On a GPU, the first call with new shapes measures launch parameters of the fused kernel. If the
    GPU's compute capability is not 9.0, or the middle convolution has more than 64 channels, the
    call also measures separate convolutions. This process and later ones use the fastest
    implementation.

    Args:
        images: [B, C, H, W], input of the block's last convolution, or of its middle convolution if
            there is a `middle_weight`; on a GPU float16 or bfloat16.
        weight: [N, C, 1, 1], weight of the last convolution. `can_fuse_transition` tests whether
            the numbers of channels are supported.
        bias: [N], bias of the last convolution.
        shortcut: [B, N, H, W], added to the last convolution's result. With a `shortcut_weight`:
            [B, S, H, W], input of the shortcut's convolution.
        shortcut_weight: [N, S, 1, 1], weight of the shortcut's convolution. None: the shortcut has
            no convolution.
        shortcut_bias: [N], bias of the shortcut's convolution. On a GPU, a bias is required with
            its weight, and must be None without it. The same holds for the middle convolution.
        next_weight: [M, N, 1, 1], weight of the next block's first convolution.
        next_bias: [M], bias of the next block's first convolution.
        middle_weight: [C, C, 3, 3], weight of the block's middle convolution, which has stride 1
            and pads with zeros. None: `images` is the result of the middle convolution.
            `can_fuse_middle` tests whether it is supported.
        middle_bias: [C], bias of the middle convolution.

    Returns:
        the block's output [B, N, H, W], and the result of the next block's first convolution,
        [B, M, H, W]. On a GPU both are channels-last.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape than documented, the arguments
            are on several devices, or only one of a weight and its bias is given.
    """
    if middle_weight is not None:
        images = F.conv2d(images, middle_weight, middle_bias, padding=1).relu()
    if shortcut_weight is not None:
        shortcut = F.conv2d(shortcut, shortcut_weight, shortcut_bias)
    output = (F.conv2d(images, weight, bias) + shortcut).relu()
    return output, F.conv2d(output, next_weight, next_bias).relu()


@block_transition.register_fake
def _(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor,
    shortcut_weight: Tensor | None,
    shortcut_bias: Tensor | None,
    next_weight: Tensor,
    *others: Tensor | None,
) -> tuple[Tensor, Tensor]:
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
    middle_weight: Tensor | None = None,
    middle_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from .block_transition_kernel import Blocks, fastest_blocks, launch_block_transition

    if images.dtype not in HALF_TYPES:
        raise ValueError(f"images must be float16 or bfloat16, not {images.dtype}")
    inputs = {
        "images": images,
        "weight": weight,
        "bias": bias,
        "shortcut": shortcut,
        "next_weight": next_weight,
        "next_bias": next_bias,
    }
    inputs |= _optional_convolution("shortcut", shortcut_weight, shortcut_bias)
    inputs |= _optional_convolution("middle", middle_weight, middle_bias)
    tensors = _kernel_tensors(inputs)
    if images.numel() == 0:
        return _empty_outputs(images, weight, next_weight)

    def fused(blocks: Blocks) -> tuple[Tensor, Tensor]:
        results = _empty_outputs(images, weight, next_weight)
        output, reduced = (
            _kernel_map(result.permute(0, 2, 3, 1), "middle_weight" in inputs) for result in results
        )
        launch_block_transition({**tensors, "output": output, "reduced": reduced}, blocks)
        return results

    def separate() -> tuple[Tensor, Tensor]:
        if middle_weight is not None and middle_bias is not None:
            window = [1, 1], [1, 1], [1, 1]
            middle = cudnn_convolution(images, middle_weight, middle_bias, *window, True)
            others = shortcut, shortcut_weight, shortcut_bias, next_weight, next_bias
            result: tuple[Tensor, Tensor] = block_transition(middle, weight, bias, *others)
            return result
        residual = shortcut
        if shortcut_weight is not None and shortcut_bias is not None:
            residual = gemm_convolution(shortcut, shortcut_weight, shortcut_bias, None, False)
        output = gemm_convolution(images, weight, bias, residual, True)
        return output, gemm_convolution(output, next_weight, next_bias, None, True)

    candidates = fastest_blocks(tensors)
    implementations: list[Callable[[], tuple[Tensor, Tensor]]] = [
        partial(fused, blocks) for blocks in candidates
    ]
    may_be_slower = middle_weight is not None and len(middle_weight) > _FASTER_MIDDLE
    capability = torch.cuda.get_device_capability(images.device)
    if may_be_slower or capability != _MEASURED_CAPABILITY:
        implementations.append(separate)
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    key = "block_transition", images.dtype, shapes, candidates
    with torch.cuda.device(images.device):
        return run_fastest(key, implementations)


def _optional_convolution(
    name: str, weight: Tensor | None, bias: Tensor | None
) -> dict[str, Tensor]:
    """Return weight and bias of a convolution by argument name. If both are None, return {}."""
    if (weight is None) != (bias is None):
        raise ValueError(f"{name}_weight and {name}_bias go together; give both or neither")
    if weight is None or bias is None:
        return {}
    return {f"{name}_weight": weight, f"{name}_bias": bias}


def _empty_outputs(images: Tensor, weight: Tensor, next_weight: Tensor) -> tuple[Tensor, Tensor]:
    return empty_pointwise_output(images, weight), empty_pointwise_output(images, next_weight)


def _kernel_tensors(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check the inputs of `block_transition`, and return them as the kernel's arguments.

    All results are contiguous and 16-byte aligned. Weights are returned as [output channels, input
    channels], or [output channels, 9 * input channels] if they are 3x3. Feature maps have the shape
    that `_kernel_map` returns.

    Raises:
        ValueError: a tensor has another dtype or shape than documented, or the tensors are on
            several devices.
    """
    images = inputs["images"]
    batch, channels, rows, columns = images.shape
    outputs, reduced = len(inputs["weight"]), len(inputs["next_weight"])
    shortcut = inputs["shortcut_weight"].shape[1] if "shortcut_weight" in inputs else outputs
    shapes = {
        "images": (batch, channels, rows, columns),
        "weight": (outputs, channels, 1, 1),
        "bias": (outputs,),
        "shortcut": (batch, shortcut, rows, columns),
        "shortcut_weight": (outputs, shortcut, 1, 1),
        "shortcut_bias": (outputs,),
        "next_weight": (reduced, outputs, 1, 1),
        "next_bias": (reduced,),
        "middle_weight": (channels, channels, 3, 3),
        "middle_bias": (channels,),
    }
    common_device("block_transition", inputs.values())
    tensors = {}
    for name, tensor in inputs.items():
        check_argument(name, tensor, images.dtype, shapes[name])
        tensors[name] = aligned(tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor)
        if name in ("images", "shortcut"):
            tensors[name] = _kernel_map(tensors[name], "middle_weight" in inputs)
        elif tensor.dim() == 4:
            tensors[name] = tensors[name].flatten(1)
    return tensors


def _kernel_map(tensor: Tensor, has_middle: bool) -> Tensor:
    """Return a view of a feature map [B, H, W, C] in the shape that the kernel reads or writes.

    Only the middle convolution needs rows and columns. Without a middle convolution, the shape is
    [1, 1, B * H * W, C].
    """
    return tensor if has_middle else tensor.view(1, 1, -1, tensor.shape[3])

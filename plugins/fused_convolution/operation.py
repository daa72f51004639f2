"""`maskrcnn::convolution_relu` and `maskrcnn::pointwise_convolution`: fused convolutions.

Both can add a residual map before they write the result. `convolution_relu` always applies a ReLU,
`pointwise_convolution` only on request. Fusing these steps saves memory traffic. In some cases,
`pointwise_convolution` is computed by `maskrcnn::upsampling_convolution`.
"""

# On a GPU, cuDNN computes `convolution_relu`. For float16 and bfloat16, a Triton kernel computes
# `pointwise_convolution`: cuDNN cannot add a residual map of half the output's height and width,
# and takes long to select an algorithm that adds a map of the output's size.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime.arguments import HALF_TYPES


@torch.library.custom_op("maskrcnn::convolution_relu", mutates_args=(), device_types="cpu")
def convolution_relu(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """Compute `relu(conv2d(images) + residual)` with N output channels.

    Args:
        images: [B, C, H, W].
        weight: [N, C, K, K], kernels of K x K.
        bias: [N].
        residual: [B, N, H', W'], the output's shape, added before the ReLU. None: nothing is added.
        stride: vertical and horizontal stride.
        padding: vertical and horizontal padding with zeros.
        dilation: vertical and horizontal dilation.

    Returns:
        [B, N, H', W']. On a GPU, it is channels-last.
    """
    output = F.conv2d(images, weight, bias, stride, padding, dilation)
    return (output if residual is None else output + residual).relu()


@convolution_relu.register_fake
def _(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    return empty_output(images, weight, stride, padding, dilation)


@convolution_relu.register_kernel("cuda")
def _(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    images, weight = (x.contiguous(memory_format=torch.channels_last) for x in (images, weight))
    if residual is None:
        return torch.cudnn_convolution_relu(images, weight, bias, stride, padding, dilation, 1)
    residual = residual.contiguous(memory_format=torch.channels_last)
    return torch.cudnn_convolution_add_relu(
        images, weight, residual, 1.0, bias, stride, padding, dilation, 1
    )


def _setup_convolution_relu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, weight, _, residual, *ctx.window = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(images, weight, output)


def _convolution_relu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    images, weight, output = ctx.saved_tensors
    grad = torch.ops.aten.threshold_backward(grad, output, 0)
    gradients = convolution_gradients(ctx, grad, images, weight, *ctx.window)
    return *gradients, grad if ctx.has_residual else None, None, None, None


convolution_relu.register_autograd(
    _convolution_relu_backward, setup_context=_setup_convolution_relu
)


@torch.library.triton_op("maskrcnn::pointwise_convolution", mutates_args=())
def pointwise_convolution(
    images: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: int, relu: bool
) -> Tensor:
    """Compute a 1x1 convolution with N output channels, plus an optional residual map and ReLU.

    Args:
        images: [B, C, H, W].
        weight: [N, C, 1, 1].
        bias: [N].
        residual: [B, N, H', W'], the output's shape, or [B, N, H' / 2, W' / 2], which is upsampled
            by repetition. None: nothing is added.
        stride: stride in both directions.
        relu: whether to apply a ReLU.

    Returns:
        [B, N, H', W']. On a GPU, float16 and bfloat16 outputs are channels-last.
    """
    if images.dtype not in HALF_TYPES:
        in_torch: Tensor = _pointwise_in_torch(images, weight, bias, residual, stride, relu)
        return in_torch
    from .pointwise_kernel import can_keep_weight, launch_pointwise_convolution

    is_plain = stride == 1 and not relu
    if residual is not None and is_plain and residual.shape[2:] != images.shape[2:]:
        has_one_type = all(x.dtype == images.dtype for x in (weight, bias, residual))
        if has_one_type and can_keep_weight(images, len(weight)):
            upsampling: Tensor = upsampling_convolution(images, weight, bias, residual)
            return upsampling
    output = empty_pointwise_output(images, weight, stride)
    launch_pointwise_convolution(images, weight, bias, residual, output, stride, relu)
    return output


@torch.library.custom_op("maskrcnn::upsampling_convolution", mutates_args=(), device_types="cuda")
def upsampling_convolution(images: Tensor, weight: Tensor, bias: Tensor, coarse: Tensor) -> Tensor:
    """Compute a 1x1 convolution with N output channels, plus an upsampled map.

    The operation is part of `pointwise_convolution`, and has no gradient of its own. It is opaque
    to torch's compiler, which does not support tensor descriptors as arguments of Triton kernels.

    Args:
        images: [B, C, H, W], float16 or bfloat16.
        weight: [N, C, 1, 1].
        bias: [N].
        coarse: [B, N, H / 2, W / 2], which is upsampled by repetition.

    Returns:
        [B, N, H, W], channels-last.
    """
    from .pointwise_kernel import launch_upsampling_convolution

    output = empty_pointwise_output(images, weight)
    if output.numel():
        with torch.cuda.device(images.device):
            launch_upsampling_convolution(images, weight, bias, coarse, output)
    return output


@upsampling_convolution.register_fake
def _(images: Tensor, weight: Tensor, bias: Tensor, coarse: Tensor) -> Tensor:
    return empty_pointwise_output(images, weight)


@pointwise_convolution.register_kernel("cpu")  # type: ignore[untyped-decorator]
def _pointwise_in_torch(
    images: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: int, relu: bool
) -> Tensor:
    output = F.conv2d(images, weight, bias, stride)
    if residual is not None:
        output = output + F.interpolate(residual, output.shape[2:], mode="nearest")
    return output.relu() if relu else output


def _setup_pointwise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, weight, _, residual, ctx.stride, ctx.relu = inputs
    ctx.residual_shape = None if residual is None else residual.shape
    ctx.save_for_backward(images, weight, *([output] if ctx.relu else []))


def _pointwise_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    images, weight, *outputs = ctx.saved_tensors
    for output in outputs:
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    window = [ctx.stride] * 2, [0, 0], [1, 1]
    gradients = convolution_gradients(ctx, grad, images, weight, *window)
    residual = None
    if ctx.residual_shape is not None:
        rows, columns = ctx.residual_shape[2:]
        upsampled = grad.shape[2:] != (rows, columns)
        # In this order of axes, torch's compiler writes the sum channels-last.
        by_pixel = grad.movedim(1, -1)
        blocks = torch.unflatten(torch.unflatten(by_pixel, 2, (columns, -1)), 1, (rows, -1))
        residual = blocks.sum(dim=(2, 4)).movedim(-1, 1) if upsampled else grad
    return *gradients, residual, None, None


pointwise_convolution.register_autograd(_pointwise_backward, setup_context=_setup_pointwise)


def convolution_gradients(
    ctx: Any,
    grad: Tensor,
    images: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of images, weight and bias, each None if autograd does not need it."""
    bias, not_transposed = [weight.shape[0]], (False, [0, 0])
    needed = list(ctx.needs_input_grad[:3])
    gradients: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        grad, images, weight, bias, stride, padding, dilation, *not_transposed, 1, needed
    )
    return gradients


def empty_output(
    images: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return an uninitialised tensor for the output of a convolution, channels-last."""
    sides = [
        (side + 2 * pad - step * (kernel - 1) - 1) // stride_ + 1
        for side, kernel, stride_, pad, step in zip(
            images.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    shape = (images.shape[0], *sides, weight.shape[0])
    return images.new_empty(shape).permute(0, 3, 1, 2)


def empty_pointwise_output(images: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """Return an uninitialised tensor for the output of a 1x1 convolution, channels-last."""
    return empty_output(images, weight, [stride] * 2, [0, 0], [1, 1])


def pixel_matrix(images: Tensor) -> Tensor:
    """Return a view [B * H * W, C] of a channels-last tensor [B, C, H, W]."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])

"""`maskrcnn::cudnn_convolution` and `maskrcnn::gemm_convolution`, computed by NVIDIA libraries.

On a GPU, cuDNN or cuBLASLt adds the bias and applies the ReLU before it writes the result.
`gemm_convolution` also adds a residual map. In torch, these steps would be separate passes over
memory. Only `cudnn_convolution` has a gradient.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime.arguments import HALF_TYPES
from .cublaslt import Algorithm, Product, matrix_product
from .cudnn import convolve_with_bias
from .fastest import run_fastest
from .libraries import UnsupportedError
from .operation import (
    convolution_gradients,
    empty_output,
    empty_pointwise_output,
    pixel_matrix,
    pointwise_convolution,
)


@torch.library.custom_op("maskrcnn::cudnn_convolution", mutates_args=(), device_types="cpu")
def cudnn_convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    relu: bool,
) -> Tensor:
    """Compute `conv2d(images)` with N output channels, plus an optional ReLU.

    On a GPU, the implementation depends on the dtype:

    - float16 and bfloat16: the first call with new shapes measures two implementations. This call
      and later ones use the faster one.
    - other dtypes: torch computes the convolution. If `relu` is False, the bias is added in a
      separate pass over memory.

    Args:
        images: [B, C, H, W].
        weight: [N, C, K, K], kernels of K x K.
        bias: [N].
        stride: vertical and horizontal stride.
        padding: vertical and horizontal padding with zeros.
        dilation: vertical and horizontal dilation.
        relu: whether to apply a ReLU.

    Returns:
        [B, N, H', W'], on a GPU channels-last.
    """
    output = F.conv2d(images, weight, bias, stride, padding, dilation)
    return output.relu() if relu else output


@cudnn_convolution.register_fake
def _(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    relu: bool,
) -> Tensor:
    return empty_output(images, weight, stride, padding, dilation)


@cudnn_convolution.register_kernel("cuda")
def _(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    relu: bool,
) -> Tensor:
    images, weight = (x.contiguous(memory_format=torch.channels_last) for x in (images, weight))
    bias, window = bias.contiguous(), (stride, padding, dilation)
    if images.numel() == 0:
        return empty_output(images, weight, *window)

    def by_cudnn() -> Tensor:
        output = empty_output(images, weight, *window)
        convolve_with_bias(images, weight, bias, output, *window, relu)
        return output

    def by_torch() -> Tensor:
        if relu:
            return torch.cudnn_convolution_relu(images, weight, bias, *window, 1)
        return F.conv2d(images, weight, bias, *window)

    if images.dtype not in HALF_TYPES:
        return by_torch()
    sizes = tuple(images.shape), tuple(weight.shape), *map(tuple, window)
    key = "cudnn_convolution", images.dtype, *sizes, relu
    with torch.cuda.device(images.device):
        return run_fastest(key, [by_cudnn, by_torch])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, weight, _, *ctx.window, relu = inputs
    ctx.save_for_backward(images, weight, *([output] if relu else []))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    images, weight, *outputs = ctx.saved_tensors
    for output in outputs:
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    gradients = convolution_gradients(ctx, grad, images, weight, *ctx.window)
    return *gradients, None, None, None, None


cudnn_convolution.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("maskrcnn::gemm_convolution", mutates_args=(), device_types="cpu")
def gemm_convolution(
    images: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, relu: bool
) -> Tensor:
    """Compute a 1x1 convolution with N output channels, plus an optional residual map and ReLU.

    On a GPU, the first call with new shapes measures cuBLASLt's algorithms. With a residual, or if
    cuBLASLt has no algorithm, the Triton kernel of `pointwise_convolution` is measured, too. This
    process and later ones use the fastest implementation. The operation supports neither strides
    nor upsampling.

    Args:
        images: [B, C, H, W]; on a GPU float16 or bfloat16.
        weight: [N, C, 1, 1].
        bias: [N].
        residual: [B, N, H, W]. None: nothing is added.
        relu: whether to apply a ReLU.

    Returns:
        [B, N, H, W], on a GPU channels-last.
    """
    output = F.conv2d(images, weight, bias)
    output = output if residual is None else output + residual
    return output.relu() if relu else output


@gemm_convolution.register_fake
def _(images: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    return empty_pointwise_output(images, weight)


@gemm_convolution.register_kernel("cuda")
def _(images: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    images = images.contiguous(memory_format=torch.channels_last)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    weight, bias = weight.contiguous(), bias.contiguous()
    output = empty_pointwise_output(images, weight)
    if output.numel() == 0:
        return output

    def by_cublas(product: Product, algorithm: Algorithm) -> Tensor:
        added = None if residual is None else pixel_matrix(residual)
        matrices = pixel_matrix(images), pixel_matrix(weight), bias, added, pixel_matrix(output)
        product.queue(algorithm, *matrices)
        return output

    pixels, has_residual = output.numel() // len(weight), residual is not None
    key = images.dtype, pixels, *weight.shape[:2], has_residual, relu
    implementations: list[Callable[[], Tensor]] = []
    with torch.cuda.device(images.device):
        with suppress(UnsupportedError):
            product = matrix_product(images.device, *key)
            implementations += [partial(by_cublas, product, a) for a in product.algorithms]
        # Without a residual, the Triton kernel is hardly ever faster, but takes long to compile.
        if residual is not None or not implementations:
            arguments = images, weight, bias, residual, 1, relu
            implementations.append(partial(pointwise_convolution, *arguments))
        return run_fastest(("gemm_convolution", *key), implementations)

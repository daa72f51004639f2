"""`maskrcnn::class_logits`, `relu_class_logits`: mask logits of each instance, for its class only.

Specification of all implementations: products and sums are float32. Each logit, including the bias,
and each gradient is rounded once to the dtype of the features. If torch may use TF32 in matrix
products, the gradients of weight and bias are sums of values rounded to TF32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime.arguments import FLOAT_TYPES, kernel_argument
from ..runtime.compilation import Kernel
from ..runtime.launching import launch_kernel
from .kernel import (
    class_logits_kernel,
    class_logits_launch,
    relu_class_logits_backward_kernel,
    relu_class_logits_backward_launch,
    relu_class_logits_kernel,
)


@torch.library.custom_op("maskrcnn::class_logits", mutates_args=(), device_types="cpu")
def class_logits(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Compute the logits of each instance's class in all mask cells.

    This is the last, 1x1 convolution of a mask head, without the output channels of other classes.
    The operation has no gradient.

    Args:
        features: [R, P, C] of R instances with P cells; on a GPU float32, float16 or bfloat16.
        weight: [K, C] of K classes, of the features' dtype.
        bias: [K] of the features' dtype.
        labels: [R] int64, class of each instance, 0 to K - 1.

    Returns:
        logits [R, P] of the features' dtype.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape than documented.
    """
    return _logits(features.float(), weight, bias, labels).to(features.dtype)


@class_logits.register_fake
def _(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return features.new_empty(features.shape[:2])


@class_logits.register_kernel("cuda")
def _(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return _launch_logits(
        class_logits_kernel, features=features, weight=weight, bias=bias, labels=labels
    )


@torch.library.custom_op("maskrcnn::relu_class_logits", mutates_args=(), device_types="cpu")
def relu_class_logits(
    features: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
) -> Tensor:
    """Compute `class_logits(relu(features + offset), weight, bias, labels)`, with gradient.

    The argument `offset` is [C], of the features' dtype. The other arguments, the result and the
    errors are those of `class_logits`.
    """
    activated = (features.float() + offset.float()).relu()
    return _logits(activated, weight, bias, labels).to(features.dtype)


@relu_class_logits.register_fake
def _(features: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return features.new_empty(features.shape[:2])


@relu_class_logits.register_kernel("cuda")
def _(features: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return _launch_logits(
        relu_class_logits_kernel,
        features=features,
        offset=offset,
        weight=weight,
        bias=bias,
        labels=labels,
    )


@torch.library.custom_op(
    "maskrcnn::relu_class_logits_backward", mutates_args=(), device_types="cpu"
)
def relu_class_logits_backward(
    grad: Tensor, features: Tensor, offset: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the features, and sums for the gradients of weight and offset.

    `grad` is the gradient of the logits, [R, P]. The other arguments are those of
    `relu_class_logits`.

    Returns:
        features: [R, P, C], gradient of the features, of their dtype.
        weighted: [R, C] float32, sum over the cells of the logits' gradient times the activated
            features. Its sum over the instances of a class is the gradient of the class's weight.
        sums: [R, C] float32, sum over the cells of the features' gradient before it is rounded. Its
            sum over the instances is the gradient of the offset.
    """
    shifted = features.float() + offset.float()
    grad = grad.float()[:, :, None]
    own = torch.where(shifted <= 0, 0, grad * weight[labels].float()[:, None])
    return own.to(features.dtype), (grad * shifted.relu()).sum(dim=1), own.sum(dim=1)


@relu_class_logits_backward.register_fake
def _(
    grad: Tensor, features: Tensor, offset: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(features)


@relu_class_logits_backward.register_kernel("cuda")
def _(
    grad: Tensor, features: Tensor, offset: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    value_type = _value_type(features)
    instances, cells, channels = features.shape
    gradients = _empty_gradients(features)
    inputs = [
        kernel_argument("grad", grad, features.dtype, (instances, cells)),
        *_arguments(features=features, offset=offset, weight=weight, labels=labels),
    ]
    kernel = relu_class_logits_backward_kernel(value_type, channels)
    launch_kernel(kernel, relu_class_logits_backward_launch(instances, cells), inputs, gradients)
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, offset, weight, _, labels = inputs
    ctx.save_for_backward(features, offset, weight, labels)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    features, offset, weight, labels = ctx.saved_tensors
    gradient, weighted, sums = relu_class_logits_backward(grad, features, offset, weight, labels)
    # Use matrix products instead of `index_add`, which adds in no fixed order on a GPU.
    is_class = (labels == torch.arange(len(weight), device=labels.device)[:, None]).float()
    # Disable autocast: a compiled backward pass is traced under the autocast of the forward pass.
    with torch.autocast(labels.device.type, enabled=False):
        weight_gradient = is_class @ weighted
        bias_gradient = is_class @ grad.float().sum(dim=1)
    parameters = sums.sum(dim=0), weight_gradient, bias_gradient
    return gradient, *(x.to(features.dtype) for x in parameters), None


relu_class_logits.register_autograd(_backward, setup_context=_setup_context)


def _logits(activated: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    # Do not use a matrix product: autocast would round its inputs.
    products = activated * weight[labels].float()[:, None]
    return products.sum(dim=2) + bias[labels].float()[:, None]


def _launch_logits(kernel: Callable[[str, int], Kernel], **tensors: Tensor) -> Tensor:
    """Launch a kernel that computes logits, and return the logits [R, P].

    `kernel` returns the kernel for a type and a number of channels. `tensors` are the arguments of
    `class_logits` or `relu_class_logits`, by name.
    """
    features = tensors["features"]
    value_type = _value_type(features)
    instances, cells, channels = features.shape
    inputs = _arguments(**tensors)
    logits = features.new_empty(instances, cells)
    launch = class_logits_launch(instances, cells)
    launch_kernel(kernel(value_type, channels), launch, inputs, [logits])
    return logits


def _empty_gradients(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sums = features.new_empty(features.shape[0], features.shape[2], dtype=torch.float32)
    return features.new_empty(features.shape), sums, torch.empty_like(sums)


def _value_type(features: Tensor) -> str:
    value_type = FLOAT_TYPES.get(features.dtype)
    if value_type is None:
        raise ValueError(f"features must be float32, float16 or bfloat16, not {features.dtype}")
    return value_type


def _arguments(**tensors: Tensor) -> list[Tensor]:
    """Return arguments of `relu_class_logits`, contiguous and 16-byte aligned, in the given order.

    The arguments are given by name. Raise ValueError if a dtype or shape is wrong.
    """
    features = tensors["features"]
    instances, _, channels = features.shape
    shapes = {
        "features": features.shape,
        "offset": (channels,),
        "weight": (-1, channels),
        "bias": (tensors["weight"].shape[0],),
        "labels": (instances,),
    }
    return [
        kernel_argument(
            name, tensor, torch.int64 if name == "labels" else features.dtype, shapes[name]
        )
        for name, tensor in tensors.items()
    ]

"""`maskrcnn::class_logits`: mask logits of each instance, for the instance's class only.

Contract of all implementations: products and sums are float32, and the logit, including the bias,
is rounded once to the dtype of the features.
"""

import torch
from torch import Tensor

from ..runtime.arguments import FLOAT_TYPES, kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import class_logits_kernel, class_logits_launch


@torch.library.custom_op("maskrcnn::class_logits", mutates_args=(), device_types="cpu")
def class_logits(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Compute the logits of each instance's class in all mask cells. There is no gradient.

    This is the last, 1x1 convolution of a mask head, without the output channels of other classes.

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
    products = features.float() @ weight[labels].float()[:, :, None]
    return (products[..., 0] + bias[labels].float()[:, None]).to(features.dtype)


@class_logits.register_fake
def _(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return features.new_empty(features.shape[:2])


@class_logits.register_kernel("cuda")
def _(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    value_type = FLOAT_TYPES.get(features.dtype)
    if value_type is None:
        raise ValueError(f"features must be float32, float16 or bfloat16, not {features.dtype}")
    instances, cells, channels = features.shape
    inputs = [
        kernel_argument("features", features, features.dtype, (-1, -1, -1)),
        kernel_argument("weight", weight, features.dtype, (-1, channels)),
        kernel_argument("bias", bias, features.dtype, (len(weight),)),
        kernel_argument("labels", labels, torch.int64, (instances,)),
    ]
    logits = features.new_empty(instances, cells)
    launch = class_logits_launch(instances, cells)
    launch_kernel(class_logits_kernel(value_type, channels), launch, inputs, [logits])
    return logits

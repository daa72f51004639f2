"""`maskrcnn::upsampled_class_logits`: last layers of a mask head, for each instance's class only.

Specification of all implementations: sums are float32. The result of the transposed convolution may
be rounded to the dtype of the features, or not at all, and its ReLU may turn NaN into 0. The logit
is rounded once. If torch may use TF32 in convolutions, float32 inputs of the transposed convolution
may be rounded to TF32.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..fused_convolution import convolution_relu, gemm_convolution
from ..runtime.arguments import HALF_TYPES, check_argument
from .operation import class_logits

# Height and width in output cells of an input cell.
_SIDE = 2


@torch.library.custom_op("maskrcnn::upsampled_class_logits", mutates_args=(), device_types="cpu")
def upsampled_class_logits(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    class_weight: Tensor,
    class_bias: Tensor,
    labels: Tensor,
) -> Tensor:
    """Compute a transposed convolution, a ReLU and the logits of each instance's class.

    The transposed convolution has kernels of 2x2 and stride 2, so it doubles height and width. The
    operation has no gradient.

    Args:
        features: [R, C, H, W] of R instances; on a GPU float32, float16 or bfloat16.
        weight: [2, 2, D, C], weight of the transposed convolution for each row and column of the
            2x2 output cells, of the features' dtype.
        bias: [D], bias of the transposed convolution, of the features' dtype.
        class_weight: [K, D] of K classes, of the features' dtype.
        class_bias: [K] of the features' dtype.
        labels: [R] int64, class of each instance, 0 to K - 1.

    Returns:
        logits [R, 2 * H, 2 * W] of the features' dtype.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape than documented.
    """
    output = F.conv2d(features, *_as_convolution(weight, bias)).relu()
    return _logits_of_cells(output, class_weight, class_bias, labels)


@upsampled_class_logits.register_fake
def _(features: Tensor, *others: Tensor) -> Tensor:
    return _empty_logits(features)


@upsampled_class_logits.register_kernel("cuda")
def _(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    class_weight: Tensor,
    class_bias: Tensor,
    labels: Tensor,
) -> Tensor:
    from .upsampled_kernel import is_supported, launch_upsampled_class_logits

    instances, channels = features.shape[:2]
    outputs, classes = len(bias), len(class_bias)
    dtype = features.dtype
    check_argument("weight", weight, dtype, (_SIDE, _SIDE, outputs, channels))
    check_argument("bias", bias, dtype, (outputs,))
    check_argument("class_weight", class_weight, dtype, (classes, outputs))
    check_argument("class_bias", class_bias, dtype, (classes,))
    check_argument("labels", labels, torch.int64, (instances,))
    if instances and is_supported(features, outputs):
        logits = _empty_logits(features)
        with torch.cuda.device(features.device):
            launch_upsampled_class_logits(
                features, weight, bias, class_weight, class_bias, labels, logits
            )
        return logits
    convolution = features, *_as_convolution(weight, bias)
    if dtype in HALF_TYPES:
        output = gemm_convolution(*convolution, None, True)
    else:
        output = convolution_relu(*convolution, None, [1, 1], [0, 0], [1, 1])
    return _logits_of_cells(output, class_weight, class_bias, labels)


def _empty_logits(features: Tensor) -> Tensor:
    instances, _, rows, columns = features.shape
    return features.new_empty(instances, _SIDE * rows, _SIDE * columns)


def _as_convolution(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a 1x1 convolution that computes the transposed convolution.

    Each input cell gives 2x2 output cells. The output channels of the convolution are those of the
    upper left output cell, then the upper right, the lower left and the lower right one.
    """
    return weight.flatten(0, 2)[:, :, None, None], bias.repeat(_SIDE * _SIDE)


def _logits_of_cells(
    output: Tensor, class_weight: Tensor, class_bias: Tensor, labels: Tensor
) -> Tensor:
    """Return the logits [R, 2 * H, 2 * W] of mask cells.

    `output` [R, 2 * 2 * D, H, W] is the ReLU of the convolution that `_as_convolution` describes.
    """
    instances, _, rows, columns = output.shape
    cells = rows * columns * _SIDE * _SIDE
    features = output.permute(0, 2, 3, 1).reshape(instances, cells, class_weight.shape[1])
    logits: Tensor = class_logits(features, class_weight, class_bias, labels)
    by_cell = logits.view(instances, rows, columns, _SIDE, _SIDE).permute(0, 1, 3, 2, 4)
    return by_cell.reshape(instances, _SIDE * rows, _SIDE * columns)

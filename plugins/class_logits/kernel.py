"""Compilation and launch of the kernels in `class_logits.cu`."""

import math

from ..runtime.compilation import Kernel, Launch

_WARP, _THREADS = 32, 256
# Mask cells that a warp computes. The warp loads the class's weight only once for all of them.
_CELLS_PER_WARP = 8
# Maximum number of channels per load of 16 bytes, by type of the features.
_VECTORS = {"float16": 8, "bfloat16": 8, "float": 4}


def class_logits_kernel(value_type: str, channels: int) -> Kernel:
    """Return the kernel of `maskrcnn::class_logits` for features of `channels` channels.

    `value_type` is the type of all tensors but the labels: `float16`, `bfloat16` or `float`.
    """
    return _kernel("class_logits", value_type, channels)


def relu_class_logits_kernel(value_type: str, channels: int) -> Kernel:
    """Return the kernel of `maskrcnn::relu_class_logits` for features of `channels` channels.

    `value_type` is the type of all tensors but the labels: `float16`, `bfloat16` or `float`.
    """
    return _kernel("relu_class_logits", value_type, channels)


def relu_class_logits_backward_kernel(value_type: str, channels: int) -> Kernel:
    """Return the kernel of `relu_class_logits_backward` for features of `channels` channels.

    `value_type` is the type of all tensors but the labels and the two outputs that are always
    float32: `float16`, `bfloat16` or `float`.
    """
    return _kernel("relu_class_logits_backward", value_type, channels)


def class_logits_launch(instances: int, cells: int) -> Launch:
    """Return the grid, block and scalar arguments of `class_logits` and `relu_class_logits`.

    The kernels' inputs are, in this order:

    - features [instances, cells, channels];
    - offset [channels], for `relu_class_logits` only;
    - weight [classes, channels] and bias [classes];
    - labels [instances] int64.

    The output is the logits of each instance's class, [instances, cells]. All tensors but the
    labels have the kernel's `value_type`.
    """
    blocks = -(-cells // (_CELLS_PER_WARP * _THREADS // _WARP))
    return Launch((instances, blocks, 1), (_THREADS, 1, 1), (cells,))


def relu_class_logits_backward_launch(instances: int, cells: int) -> Launch:
    """Return the grid, block and scalar arguments of `relu_class_logits_backward_kernel`.

    Inputs are the gradient of the logits [instances, cells], then features, offset, weight and
    labels as in `class_logits_launch`. Outputs are, in this order:

    - gradient of the features [instances, cells, channels];
    - each instance's part of the weight's gradient, [instances, channels] float32: the sum over the
      cells of the logit's gradient times relu(features + offset);
    - each instance's part of the offset's gradient, [instances, channels] float32: the sum over the
      cells of the features' gradient.
    """
    return Launch((instances, 1, 1), (_THREADS, 1, 1), (cells,))


def _kernel(name: str, value_type: str, channels: int) -> Kernel:
    constants = (
        ("VALUE", value_type),
        ("CHANNELS", channels),
        ("VECTOR", math.gcd(_VECTORS[value_type], channels)),
        ("THREADS", _THREADS),
    )
    return Kernel("class_logits/class_logits.cu", name, constants, fused_multiply_add=True)


PREBUILT_KERNELS = tuple(
    kernel(value_type, 256)
    for kernel in (
        class_logits_kernel,
        relu_class_logits_kernel,
        relu_class_logits_backward_kernel,
    )
    for value_type in _VECTORS
)

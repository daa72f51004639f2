"""Compilation and launch of `class_logits.cu`."""

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
    constants = (
        ("VALUE", value_type),
        ("CHANNELS", channels),
        ("VECTOR", math.gcd(_VECTORS[value_type], channels)),
        ("THREADS", _THREADS),
    )
    return Kernel(
        "class_logits/class_logits.cu", "class_logits", constants, fused_multiply_add=True
    )


def class_logits_launch(instances: int, cells: int) -> Launch:
    """Return the grid, block and scalar arguments of `class_logits_kernel`.

    Inputs are features [instances, cells, channels], weight [classes, channels], bias [classes] and
    labels [instances] int64. The output is the logits of each instance's class,
    [instances, cells]. All but the labels have the kernel's `value_type`.
    """
    blocks = -(-cells // (_CELLS_PER_WARP * _THREADS // _WARP))
    return Launch((instances, blocks, 1), (_THREADS, 1, 1), (cells,))


PREBUILT_KERNELS = tuple(class_logits_kernel(value_type, 256) for value_type in _VECTORS)

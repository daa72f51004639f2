"""Compilation and launch of the kernels in `feature_patches.cu`."""

import math
from collections.abc import Sequence

from ..runtime.compilation import Kernel, Launch

# Maximum number of feature maps that the kernels support.
MAX_LEVELS = 5
# Threads per block and per warp. A warp handles one cell of a patch.
_THREADS, _WARP = 256, 32
# Maximum number of channels per load of 16 bytes, by type of the features.
_VECTORS = {"float16": 8, "bfloat16": 8, "float": 4, "double": 2}


def feature_patches_kernel(feature_type: str, levels: int, radius: int, channels: int) -> Kernel:
    """Return the kernel of `maskrcnn::feature_patches`, which copies patches of feature maps.

    Args:
        feature_type: `float16`, `bfloat16`, `float` or `double`.
        levels: number of feature maps, 1 to `MAX_LEVELS`.
        radius: a patch is a square of 2 * radius + 1 cells per side.
        channels: channels of the feature maps.
    """
    return _kernel("feature_patches", feature_type, levels, radius, channels)


def feature_patches_backward_kernel(
    feature_type: str, levels: int, radius: int, channels: int
) -> Kernel:
    """Return the kernel that adds the gradients of patches to the gradients of feature maps.

    Args:
        feature_type: `float16`, `bfloat16`, `float` or `double`.
        levels: number of feature maps, 1 to `MAX_LEVELS`.
        radius: a patch is a square of 2 * radius + 1 cells per side.
        channels: channels of the feature maps.
    """
    return _kernel("feature_patches_backward", feature_type, levels, radius, channels)


def feature_patches_launch(
    batch: int, patches: int, radius: int, channels: int, sizes: Sequence[tuple[int, int]]
) -> Launch:
    """Return the grid, block and scalar arguments of either kernel in `feature_patches.cu`.

    B is `batch`, S is `patches` (number of patches per image), K is 2 * `radius` + 1, C is
    `channels`, and (H_l, W_l) is the entry of `sizes` for level l.

    - `feature_patches` takes one map [B, H_l, W_l, C] per level and the indices [B, S] int64 of the
      patches' centres. Its output is the patches [B, S, K, K, C].
    - `feature_patches_backward` takes the gradient of the patches and the indices of the centres.
      Its outputs are the gradients of the maps, which must be zero before the launch.
    """
    blocks = -(-patches * (2 * radius + 1) ** 2 // (_THREADS // _WARP))
    scalars = (channels, patches, *(side for size in sizes for side in size))
    return Launch((blocks, batch, 1), (_THREADS, 1, 1), scalars)


def _kernel(name: str, feature_type: str, levels: int, radius: int, channels: int) -> Kernel:
    constants = (
        ("FEATURE", feature_type),
        ("LEVELS", levels),
        ("RADIUS", radius),
        ("VECTOR", math.gcd(_VECTORS[feature_type], channels)),
        ("THREADS", _THREADS),
    )
    return Kernel("feature_patches/feature_patches.cu", name, constants)


PREBUILT_KERNELS = tuple(
    build(feature_type, levels, 1, 256)
    for build in (feature_patches_kernel, feature_patches_backward_kernel)
    for feature_type in ("float16", "bfloat16", "float")
    for levels in (1, MAX_LEVELS)
)

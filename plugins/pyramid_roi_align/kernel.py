"""Compilation and launch of `pyramid_roi_align.cu` and `pyramid_roi_align_backward.cu`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime.compilation import Kernel, Launch

# Maximum number of pyramid levels that the kernels support.
MAX_LEVELS = 5
# Threads per block.
_THREADS = 256
# Pooled cells per block of the forward kernel: a whole 7 x 7 RoI.
_CELLS = 49
# Height and width in feature cells of the tile that a block of the backward kernel computes. A warp
# computes one row of the tile.
_TILE = _THREADS // 32

# Maximum number of channels per load of 16 bytes, by type of the features.
_VECTORS = {"float16": 8, "bfloat16": 8, "float": 4, "double": 2}


class Pooling(NamedTuple):
    """Arguments of `maskrcnn::pyramid_roi_align` that are compile-time constants of its kernels."""

    output_size: int
    sampling_ratio: int
    spatial_scales: tuple[float, ...]
    canonical_level: int
    canonical_size: float
    aligned: bool
    inclusive: bool


def finest_level(spatial_scales: Sequence[float]) -> int:
    """Return log2 of the finest level's stride in input pixels, for a feature pyramid.

    `spatial_scales` are the feature cells per input pixel of each level, finest first.

    Raises:
        ValueError: a scale is not a power of two, or not half of the scale before it.
    """
    level = round(-math.log2(spatial_scales[0])) if spatial_scales[0] > 0 else 0
    if list(spatial_scales) != [2.0 ** -(level + n) for n in range(len(spatial_scales))]:
        raise ValueError(
            "spatial_scales must be powers of two, each half the one before, not "
            f"{list(spatial_scales)}"
        )
    return level


def forward_kernel(
    pooling: Pooling,
    feature_type: str,
    channels: int,
    *,
    channels_last: bool,
    pooled_channels_last: bool,
) -> Kernel:
    """Return the kernel of `maskrcnn::pyramid_roi_align`.

    Args:
        pooling: arguments of the operation.
        feature_type: `float16`, `bfloat16`, `float` or `double`.
        channels: channels of the feature maps.
        channels_last: whether the feature maps are channels-last.
        pooled_channels_last: whether the pooled features are channels-last. This requires
            `channels_last`.
    """
    vector = math.gcd(_VECTORS[feature_type], channels) if channels_last else 1
    return Kernel(
        "pyramid_roi_align/pyramid_roi_align.cu",
        "pyramid_roi_align",
        (
            *_constants(pooling, feature_type, vector, channels_last),
            ("CELLS", _CELLS),
            ("POOLED_CHANNELS_LAST", int(pooled_channels_last)),
        ),
        fused_multiply_add=True,
    )


def backward_kernel(pooling: Pooling, feature_type: str, channels: int) -> Kernel:
    """Return the kernel of `pyramid_roi_align_backward`.

    `pooling` holds the arguments of the operation. `feature_type` and `channels` are the type and
    the number of channels of the feature maps. All gradients are channels-last.
    """
    return Kernel(
        "pyramid_roi_align/pyramid_roi_align_backward.cu",
        "pyramid_roi_align_backward",
        _constants(pooling, feature_type, math.gcd(_VECTORS[feature_type], channels), True),
        fused_multiply_add=True,
    )


def pyramid_roi_align_launch(
    batch: int, rois: int, channels: int, sizes: Sequence[tuple[int, int]], output_size: int
) -> Launch:
    """Return the grid, block and scalar arguments of the forward kernel.

    B is `batch`, R is `rois` (number of RoIs per image), C is `channels`, P is `output_size`, and
    (H_l, W_l) is the entry of `sizes` for level l. The kernel takes one map [B, C, H_l, W_l] per
    level and RoIs [B, R, 4] float32. Its output is [B, R, C, P, P].
    """
    parts = -(-(output_size**2) // _CELLS)
    scalars = (channels, *(side for size in sizes for side in size))
    return Launch((rois, batch, parts), (_THREADS, 1, 1), scalars)


def backward_launch(
    kernel: Kernel, batch: int, rois: int, channels: int, sizes: Sequence[tuple[int, int]]
) -> Launch:
    """Return the grid, block and scalar arguments of `kernel`, a result of `backward_kernel`.

    B is `batch`, R is `rois` (number of RoIs per image), C is `channels`, P is the side of the
    pooled features, and (H_l, W_l) is the entry of `sizes` for level l. The kernel takes the
    gradient of the pooled features [B, R, P, P, C] and RoIs [B, R, 4] float32. Its outputs are the
    gradients of the maps, [B, H_l, W_l, C] for each level.
    """
    tiles = sum(-(-height // _TILE) * -(-width // _TILE) for height, width in sizes)
    per_block = 32 * int(dict(kernel.constants)["VECTOR"])
    scalars = (channels, rois, *(side for size in sizes for side in size))
    return Launch((tiles, batch, -(-channels // per_block)), (_THREADS, 1, 1), scalars)


def _constants(
    pooling: Pooling, feature_type: str, vector: int, channels_last: bool
) -> tuple[tuple[str, int | float | str], ...]:
    return (
        ("FEATURE", feature_type),
        ("LEVELS", len(pooling.spatial_scales)),
        ("OUTPUT_SIZE", pooling.output_size),
        ("SAMPLING_RATIO", pooling.sampling_ratio),
        ("FINEST_LEVEL", finest_level(pooling.spatial_scales)),
        ("CANONICAL_LEVEL", pooling.canonical_level),
        ("CANONICAL_SIZE", float(pooling.canonical_size)),
        ("ALIGNED", int(pooling.aligned)),
        ("INCLUSIVE", int(pooling.inclusive)),
        ("CHANNELS_LAST", int(channels_last)),
        ("VECTOR", vector),
        ("THREADS", _THREADS),
    )


def _variants(pooling: Pooling, *feature_types: str) -> tuple[Kernel, ...]:
    """Return a forward and a backward kernel per feature type, for `PREBUILT_KERNELS`.

    The kernels are for feature maps of 256 channels, channels-last.
    """
    forward = (
        forward_kernel(pooling, kind, 256, channels_last=True, pooled_channels_last=True)
        for kind in feature_types
    )
    return *forward, *(backward_kernel(pooling, kind, 256) for kind in feature_types)


_BOXES = Pooling(7, 2, (1 / 4, 1 / 8, 1 / 16, 1 / 32), 4, 224.0, False, False)
_MASKS = _BOXES._replace(output_size=14)
_C4 = Pooling(14, 0, (1 / 16,), 4, 224.0, True, True)

PREBUILT_KERNELS = (
    *_variants(_BOXES, *_VECTORS),
    *_variants(_MASKS, "float16", "bfloat16", "float"),
    *_variants(_C4, "float16", "float"),
    *(
        forward_kernel(_BOXES, kind, 256, channels_last=False, pooled_channels_last=False)
        for kind in _VECTORS
    ),
    forward_kernel(_BOXES, "float16", 256, channels_last=True, pooled_channels_last=False),
)

"""Compilation and launch of `pyramid_roi_align.cu` and `pyramid_roi_align_backward.cu`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..compilation import Kernel, Launch

MAX_LEVELS = 5
_THREADS = 256
_CELLS = 49

# Widest loads: 16 bytes.
_VECTORS = {"float16": 8, "bfloat16": 8, "float": 4, "double": 2}


class Pooling(NamedTuple):
    """Attributes of `maskrcnn::pyramid_roi_align`, which is where they are explained."""

    output_size: int
    sampling_ratio: int
    spatial_scales: tuple[float, ...]
    canonical_level: int
    canonical_size: float
    aligned: bool
    inclusive: bool


def finest_level(spatial_scales: Sequence[float]) -> int:
    """Level of the first of a pyramid's scales: log2 of the stride.

    Raises:
        ValueError: the scales are not powers of two, each half the one before.
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
    """The kernel that pools features of a type: `float16`, `bfloat16`, `float` or `double`.

    Maps with channels last can be pooled into either order, others only into their own.
    """
    vector = math.gcd(_VECTORS[feature_type], channels) if channels_last else 1
    return Kernel(
        "pyramid_roi_align.cu",
        "pyramid_roi_align",
        (
            *_constants(pooling, feature_type, vector, channels_last),
            ("POOLED_CHANNELS_LAST", int(pooled_channels_last)),
        ),
        fused_multiply_add=True,
    )


def backward_kernel(pooling: Pooling, feature_type: str, channels: int) -> Kernel:
    """The kernel that adds gradients of pooled features up; they become `float` or `double`.

    There is none but with channels last: even with the copies that others need, it is more than
    twice as fast as additions to scattered addresses.
    """
    return Kernel(
        "pyramid_roi_align_backward.cu",
        "pyramid_roi_align_backward",
        _constants(pooling, feature_type, math.gcd(4, channels), True),
        fused_multiply_add=True,
    )


def pyramid_roi_align_launch(
    batch: int, rois: int, channels: int, sizes: Sequence[tuple[int, int]], output_size: int
) -> Launch:
    """Launch of both kernels.

    Forward: a map [B, C, H_l, W_l] a level and rois [B, R, 4] float32 -> [B, R, C, P, P]; sizes
    are (H_l, W_l). Backward: gradients [B, R, C, P, P] and rois -> a map a level. With channels
    last, all of them have their channels innermost in memory.
    """
    parts = -(-(output_size**2) // _CELLS)
    scalars = (channels, *(side for size in sizes for side in size))
    return Launch((rois, batch, parts), (_THREADS, 1, 1), scalars)


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
        ("CELLS", _CELLS),
        ("THREADS", _THREADS),
    )


def _variants(pooling: Pooling, *feature_types: str) -> tuple[Kernel, ...]:
    """What the torch operation needs with channels last."""
    forward = (
        forward_kernel(pooling, kind, 256, channels_last=True, pooled_channels_last=True)
        for kind in feature_types
    )
    return *forward, *(backward_kernel(pooling, kind, 256) for kind in feature_types)


_BOXES = Pooling(7, 2, (1 / 4, 1 / 8, 1 / 16, 1 / 32), 4, 224.0, False, False)
_MASKS = _BOXES._replace(output_size=14)
_C4 = Pooling(14, 0, (1 / 16,), 4, 224.0, True, True)

VARIANTS = (
    *_variants(_BOXES, *_VECTORS),
    *_variants(_MASKS, "float16", "bfloat16", "float"),
    *_variants(_C4, "float16", "float"),
    *(
        forward_kernel(_BOXES, kind, 256, channels_last=False, pooled_channels_last=False)
        for kind in _VECTORS
    ),
    forward_kernel(_BOXES, "float16", 256, channels_last=True, pooled_channels_last=False),
)

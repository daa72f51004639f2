"""Compilation and launch of `encode_boxes.cu` and `decode_boxes.cu`."""

import math

from ..compilation import Kernel, Launch

MAX_LOG_SCALE = math.log(1000 / 16)
"""Growth of a box is limited to a factor of 1000 / 16."""
_THREADS = 256


def encode_boxes_kernel(center_weight: float, size_weight: float) -> Kernel:
    """The kernel that makes targets with the given factors of (dx, dy) and of (dw, dh)."""
    return Kernel("encode_boxes.cu", "encode_boxes", _weights(center_weight, size_weight))


def encode_boxes_launch(count: int) -> Launch:
    """Launch for boxes [K, 4] and references [K, 4] -> deltas [K, 4]."""
    return Launch((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), (count,))


def decode_boxes_kernel(
    center_weight: float, size_weight: float, min_side: float, *, inclusive: bool
) -> Kernel:
    """The kernel that decodes, clips and measures; its arguments are those of the operation."""
    constants = (
        *_weights(center_weight, size_weight),
        ("MAX_LOG_SCALE", MAX_LOG_SCALE),
        ("MIN_SIDE", float(min_side)),
        ("INCLUSIVE", int(inclusive)),
    )
    return Kernel("decode_boxes.cu", "decode_boxes", constants)


def decode_boxes_launch(
    batch: int, references: int, classes: int, chosen: int, *, shared: bool
) -> Launch:
    """Launch of the decoding kernel.

    Deltas [B, N, C, 4], references [B, N, 4], or [1, N, 4] if shared, indices [B, K] int64 and
    image sizes [B, 2] int64 -> boxes [B, K, 4] and flags [B, K] uint8.
    """
    grid = (-(-chosen // _THREADS), batch, 1)
    scalars = (references, 0 if shared else references, classes, chosen)
    return Launch(grid, (_THREADS, 1, 1), scalars)


def _weights(center_weight: float, size_weight: float) -> tuple[tuple[str, int | float], ...]:
    return (
        ("CENTER_WEIGHT", float(center_weight)),
        ("SIZE_WEIGHT", float(size_weight)),
        ("THREADS", _THREADS),
    )


VARIANTS = (
    encode_boxes_kernel(1.0, 1.0),
    encode_boxes_kernel(10.0, 5.0),
    decode_boxes_kernel(1.0, 1.0, 1e-3, inclusive=False),
    decode_boxes_kernel(10.0, 5.0, 1e-2, inclusive=False),
    decode_boxes_kernel(10.0, 5.0, 0.0, inclusive=True),
)

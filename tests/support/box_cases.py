"""Boxes shared by tests of several operations, and a reference IoU."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_INF, _NAN = float("inf"), float("nan")
# Boxes [18, 4]: empty, inverted, tiny, huge, infinite and NaN ones, and two ordinary ones.
ODD_BOXES = torch.tensor(
    [
        [5, 5, 5, 5],
        [5, 5, 5, 9],
        [9, 9, 3, 3],
        [9, 0, 3, 5],
        [-0.0, 0, 0, -0.0],
        [0, 0, 1e-30, 1e-30],
        [0, 0, 1e20, 1e20],
        [-1e30, -1e30, 1e30, 1e30],
        [-1e6, -1e6, 1e6, 1e6],
        [_NAN, 0, 5, 5],
        [0, 0, 5, _NAN],
        [0, 0, _INF, 5],
        [0, 0, 0, _INF],
        [0, 0, 1, _INF],
        [5, 0, 6, _INF],
        [-_INF, -_INF, _INF, _INF],
        [0, 0, 10, 10],
        [2, 3, 8, 9],
    ]
)


def random_boxes(*shape: int, seed: int = 0) -> Tensor:
    """Return xyxy boxes [*shape, 4] with integer values, many overlaps and some equal IoUs."""
    generator = torch.Generator().manual_seed(seed)
    corners, sides = (
        torch.randint(0, most, (*shape, 2), generator=generator).float() for most in (150, 60)
    )
    return torch.cat([corners, corners + sides + 1], dim=-1)


def iou_by_definition(boxes: Tensor, others: Tensor) -> NDArray[np.float32]:
    """Return the float32 IoU [G, N] of boxes [G, 4] and [N, 4]. It is 0 unless the union is > 0."""
    a, b = boxes.numpy()[:, None], others.numpy()[None]
    with np.errstate(all="ignore"):
        near, far = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
        sides = np.maximum(far - near, np.float32(0))
        intersection = sides[..., 0] * sides[..., 1]
        areas = [(x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1]) for x in (a, b)]
        union = areas[0] + areas[1] - intersection
        return np.where(union > 0, intersection / union, np.float32(0))

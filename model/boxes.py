"""Box arithmetic. Boxes are xyxy in input pixels, as floats; x2 and y2 are exclusive edges."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class DeltaWeights(NamedTuple):
    """Factors that bring the regression targets to unit scale."""

    center: float
    size: float


_MAX_LOG_SCALE = math.log(1000 / 16)


def box_area(boxes: Tensor) -> Tensor:
    """[..., 4] to [...], in square pixels."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def pairwise_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU of boxes [..., M, 4] and [..., N, 4]: [..., M, N]; 0 where both are empty."""
    top_left = torch.maximum(boxes[..., :, None, :2], others[..., None, :, :2])
    bottom_right = torch.minimum(boxes[..., :, None, 2:], others[..., None, :, 2:])
    intersection = (bottom_right - top_left).clamp(min=0).prod(dim=-1)
    union = box_area(boxes)[..., :, None] + box_area(others)[..., None, :] - intersection
    return torch.where(union > 0, intersection / union, 0)


def clip_boxes(boxes: Tensor, image_sizes: Tensor, *, inclusive: bool = False) -> Tensor:
    """Move corners outside an image onto its border.

    Args:
        boxes: [B, K, 4].
        image_sizes: [B, 2], height and width in pixels.
        inclusive: a box keeps at least the border's pixel, as where far edges are pixels.
    """
    least = float(inclusive)
    lower = boxes.new_tensor([0.0, 0.0, least, least])
    upper = image_sizes.flip(1).repeat(1, 2)[:, None].to(boxes.dtype) - lower.flip(0)
    return torch.minimum(torch.maximum(boxes, lower), upper)


def larger_than(boxes: Tensor, side: float) -> Tensor:
    """Which boxes [..., 4] have area, and at least `side` pixels a side: [...] bool."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return ((sides >= side) & (sides > 0)).all(dim=-1)


def deltas_from_boxes(boxes: Tensor, references: Tensor, weights: DeltaWeights) -> Tensor:
    """Regression targets (Girshick et al., R-CNN, appendix C) of boxes relative to references.

    Args:
        boxes: [..., 4].
        references: [..., 4], anchors or proposals of positive size.
        weights: factors of (dx, dy) and of (dw, dh).

    Returns:
        [..., 4].
    """
    sides, reference_sides = (
        boxes[..., 2:] - boxes[..., :2],
        references[..., 2:] - references[..., :2],
    )
    centers = boxes[..., :2] + 0.5 * sides
    reference_centers = references[..., :2] + 0.5 * reference_sides
    shifts = weights.center * (centers - reference_centers) / reference_sides
    scales = weights.size * torch.log(sides / reference_sides)
    return torch.cat([shifts, scales], dim=-1)


def boxes_from_deltas(deltas: Tensor, references: Tensor, weights: DeltaWeights) -> Tensor:
    """Inverse of `deltas_from_boxes`; growth is limited to a factor of 1000 / 16."""
    reference_sides = references[..., 2:] - references[..., :2]
    reference_centers = references[..., :2] + 0.5 * reference_sides
    centers = deltas[..., :2] / weights.center * reference_sides + reference_centers
    scales = (deltas[..., 2:] / weights.size).clamp(max=_MAX_LOG_SCALE).exp()
    half_sides = 0.5 * scales * reference_sides
    return torch.cat([centers - half_sides, centers + half_sides], dim=-1)

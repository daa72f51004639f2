"""Anchor boxes of a feature pyramid."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import AnchorConfig


def cell_anchors(config: AnchorConfig) -> Tensor:
    """Anchors around the origin: [L, A, 4] float32, xyxy, rounded to whole pixels."""
    ratios = torch.tensor(config.aspect_ratios).sqrt()
    half_sides = torch.stack([1 / ratios, ratios], dim=1) / 2
    half_sides = half_sides * torch.tensor(config.sizes)[:, None, None]
    return torch.cat([-half_sides, half_sides], dim=2).round()


def pyramid_anchors(
    cell_anchors: Tensor, input_size: tuple[int, int], grid_sizes: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """Anchors of every level, in the order of the region proposal network's outputs.

    The stride is the input size over the grid size, rounded down, as in torchvision: for inputs
    that do not divide by 64 the coarsest level is a little denser than nominal.

    Args:
        cell_anchors: [L, A, 4].
        input_size: (H, W) of the padded input in pixels.
        grid_sizes: (H_l, W_l) of each level's features.

    Returns:
        a [H_l * W_l * A, 4] tensor a level, xyxy in input pixels, not clipped.
    """
    anchors = []
    for level_anchors, (rows, columns) in zip(cell_anchors, grid_sizes, strict=True):
        y = torch.arange(rows, device=cell_anchors.device) * (input_size[0] // rows)
        x = torch.arange(columns, device=cell_anchors.device) * (input_size[1] // columns)
        shift_y, shift_x = torch.meshgrid(y, x, indexing="ij")
        shifts = torch.stack([shift_x, shift_y, shift_x, shift_y], dim=-1)
        anchors.append((shifts[:, :, None] + level_anchors).reshape(-1, 4))
    return anchors

"""Anchor boxes on the cells of one map or of a feature pyramid."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import AnchorConfig


def cell_anchors(config: AnchorConfig, strides: Sequence[int]) -> Tensor:
    """Anchors around the corner of a cell: [L, A, 4] float32, xyxy.

    Args:
        config: sizes, one a level of a pyramid or all on one map, and the convention.
        strides: input pixels a cell of each of L maps.
    """
    sizes = [config.sizes] if len(strides) == 1 else [(size,) for size in config.sizes]
    return torch.stack(
        [_anchors_of_map(own, config, stride) for own, stride in zip(sizes, strides, strict=True)]
    )


def _anchors_of_map(sizes: Sequence[float], config: AnchorConfig, stride: int) -> Tensor:
    sizes_S, ratios = torch.tensor(sizes), torch.tensor(config.aspect_ratios)
    if config.convention == "legacy":
        # Girshick's Faster R-CNN rounds the sides of a cell-sized anchor, and then enlarges it.
        widths_R = (stride**2 / ratios).sqrt().round()
        sides_R2 = torch.stack([widths_R, (widths_R * ratios).round()], dim=1) / stride
        center = stride / 2
    else:
        sides_R2 = torch.stack([1 / ratios.sqrt(), ratios.sqrt()], dim=1)
        center = 0.0
    sides_RS2 = sides_R2[:, None] * sizes_S[:, None]
    if config.convention == "detectron2":
        sides_RS2 = sides_RS2.transpose(0, 1)
    half_sides = sides_RS2.flatten(0, 1) / 2
    anchors = torch.cat([center - half_sides, center + half_sides], dim=1)
    return anchors.round() if config.convention == "torchvision" else anchors


def grid_steps(
    config: AnchorConfig,
    strides: Sequence[int],
    input_size: tuple[int, int],
    grid_sizes: Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Pixels from cell to cell, down and across, of every map.

    By torchvision's convention they are the input size over the grid size, rounded down: for
    inputs that do not divide by 64 the coarsest level is a little denser than nominal.

    Args:
        config: the convention.
        strides: nominal pixels a cell of each map.
        input_size: (H, W) of the padded input in pixels.
        grid_sizes: (H_l, W_l) of each map.
    """
    if config.convention != "torchvision":
        return [(stride, stride) for stride in strides]
    return [(input_size[0] // rows, input_size[1] // columns) for rows, columns in grid_sizes]

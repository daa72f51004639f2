"""Anchors of one cell of a feature map, and distances between the anchors of adjacent cells."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .config.schema import AnchorConfig


def cell_anchors(config: AnchorConfig, strides: Sequence[int]) -> Tensor:
    """Return the A anchors of one cell of each feature map, relative to the cell's top left corner.

    Args:
        config: sizes, aspect ratios and convention (`torchvision`, `detectron2` or `legacy`) of the
            anchors. Each level of a pyramid has one of the sizes; a single map has all sizes.
        strides: stride in input pixels of each of L maps.

    Returns:
        [L, A, 4] float32, xyxy in input pixels.
    """
    sizes = [config.sizes] if len(strides) == 1 else [(size,) for size in config.sizes]
    return torch.stack(
        [_anchors_of_map(s, config, stride) for s, stride in zip(sizes, strides, strict=True)]
    )


def _anchors_of_map(sizes: Sequence[float], config: AnchorConfig, stride: int) -> Tensor:
    sizes_S, ratios = torch.tensor(sizes), torch.tensor(config.aspect_ratios)
    if config.convention == "legacy":
        # As in Girshick's Faster R-CNN, round the sides of an anchor with an area of stride**2
        # pixels first, and scale the rounded sides afterwards.
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
    """Return the distances between the anchors of adjacent cells, for each feature map.

    With the conventions `detectron2` and `legacy`, the distance is the stride. With `torchvision`,
    it is the input size divided by the grid size, rounded down.

    Args:
        config: only its anchor convention (`torchvision`, `detectron2` or `legacy`) is read.
        strides: nominal stride of each map in input pixels.
        input_size: (H, W) of the padded input in pixels.
        grid_sizes: (H_l, W_l) of each map in feature cells.

    Returns:
        (vertical, horizontal) distance in input pixels, for each map.
    """
    if config.convention != "torchvision":
        return [(stride, stride) for stride in strides]
    # Divide the input size by the grid size and round down, as torchvision does, so that weights of
    # torchvision give the same results. Unless the input size is a multiple of 64, the distances in
    # the coarsest level are slightly smaller than the stride.
    return [(input_size[0] // rows, input_size[1] // columns) for rows, columns in grid_sizes]

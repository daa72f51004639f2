"""`maskrcnn::grid_anchors`: anchor boxes of all cells of one or more feature maps.

Specification of all implementations, whose results are equal bit for bit: the anchors of cell (row,
column) are the map's base anchors, shifted by (row, column) times the map's stride in pixels.
Anchors are ordered by map, row, column, and index within the cell.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import MAX_LEVELS, grid_anchors_kernel, grid_anchors_launch


def grid_anchors_in_torch(
    cell_anchors: Tensor, steps: Sequence[int], grid_sizes: Sequence[int]
) -> Tensor:
    """Return the anchors of all cells, ordered by feature map, row, column and index in the cell.

    This is the CPU implementation of `maskrcnn::grid_anchors`. Exporters trace this function.

    Args:
        cell_anchors: [L, A, 4] float32, base anchors of each of L maps: the A anchors of the cell
            in row 0 and column 0, xyxy in input pixels. L is 1 to 5.
        steps: [2 * L], vertical and horizontal stride of each map in input pixels.
        grid_sizes: [2 * L], number of rows H_l and columns W_l of each map.

    Returns:
        [sum of H_l * W_l * A, 4] float32, xyxy in input pixels, not clipped.

    Raises:
        ValueError: `steps` or `grid_sizes` does not have two entries per map. On a GPU also: there
            are more than 5 maps, or the anchors are not float32.
    """
    device = cell_anchors.device
    anchors = []
    for cell, (down, across, rows, columns) in zip(
        cell_anchors, _maps(steps, grid_sizes), strict=True
    ):
        y, x = torch.meshgrid(
            torch.arange(rows, device=device) * down,
            torch.arange(columns, device=device) * across,
            indexing="ij",
        )
        shifts = torch.stack([x, y, x, y], dim=-1)
        anchors.append((shifts[:, :, None] + cell).reshape(-1, 4))
    return torch.cat(anchors)


grid_anchors = torch.library.custom_op(
    "maskrcnn::grid_anchors", grid_anchors_in_torch, mutates_args=(), device_types="cpu"
)


@grid_anchors.register_fake
def _(cell_anchors: Tensor, steps: Sequence[int], grid_sizes: Sequence[int]) -> Tensor:
    return _empty_anchors(cell_anchors, grid_sizes)


@grid_anchors.register_kernel("cuda")
def _(cell_anchors: Tensor, steps: Sequence[int], grid_sizes: Sequence[int]) -> Tensor:
    maps = _maps(steps, grid_sizes)
    if not 1 <= len(maps) <= MAX_LEVELS:
        raise ValueError(f"grid_anchors takes 1 to {MAX_LEVELS} feature maps, not {len(maps)}")
    cell_anchors = kernel_argument("cell_anchors", cell_anchors, torch.float32, (len(maps), -1, 4))
    anchors = _empty_anchors(cell_anchors, grid_sizes)
    launch_kernel(
        grid_anchors_kernel(len(maps)),
        grid_anchors_launch(cell_anchors.shape[1], maps),
        [cell_anchors],
        [anchors],
    )
    return anchors


def _maps(steps: Sequence[int], grid_sizes: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return (vertical stride, horizontal stride, rows, columns) of each map, from flat lists."""
    return list(zip(steps[::2], steps[1::2], grid_sizes[::2], grid_sizes[1::2], strict=True))


def _empty_anchors(cell_anchors: Tensor, grid_sizes: Sequence[int]) -> Tensor:
    cells = sum(
        rows * columns for rows, columns in zip(grid_sizes[::2], grid_sizes[1::2], strict=True)
    )
    return cell_anchors.new_empty(cells * cell_anchors.shape[1], 4)

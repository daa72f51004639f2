"""Compilation and launch of `grid_anchors.cu`."""

from collections.abc import Sequence

from ..compilation import Kernel, Launch

MAX_LEVELS = 5
_THREADS = 256


def grid_anchors_kernel(levels: int) -> Kernel:
    """The kernel for a pyramid of so many levels."""
    return Kernel("grid_anchors.cu", "grid_anchors", (("LEVELS", levels), ("THREADS", _THREADS)))


def grid_anchors_launch(anchors_per_cell: int, maps: Sequence[tuple[int, int, int, int]]) -> Launch:
    """Launch for anchors of a cell [L, A, 4] -> those of all cells [sum of H_l W_l A, 4].

    Maps are (down, across, H_l, W_l), pixels from cell to cell and size in cells.
    """
    count = anchors_per_cell * sum(rows * columns for _, _, rows, columns in maps)
    scalars = (anchors_per_cell, *(number for own in maps for number in own))
    return Launch((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), scalars)


VARIANTS = tuple(grid_anchors_kernel(levels) for levels in (1, MAX_LEVELS))

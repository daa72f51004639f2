"""Compilation and launch of `grid_anchors.cu`."""

from collections.abc import Sequence

from ..runtime.compilation import Kernel, Launch

# Maximum number of pyramid levels.
MAX_LEVELS = 5
# Threads per block.
_THREADS = 256


def grid_anchors_kernel(levels: int) -> Kernel:
    """Return the kernel of `maskrcnn::grid_anchors` for a pyramid of `levels` levels."""
    return Kernel(
        "grid_anchors/grid_anchors.cu", "grid_anchors", (("LEVELS", levels), ("THREADS", _THREADS))
    )


def grid_anchors_launch(anchors_per_cell: int, maps: Sequence[tuple[int, int, int, int]]) -> Launch:
    """Return the grid, block and scalar arguments of `grid_anchors_kernel`.

    The input is the anchors of the cell in row 0 and column 0 of each of L maps,
    [L, anchors_per_cell, 4]. The output is the anchors of all cells of all maps,
    [cells * anchors_per_cell, 4]. Both are float32.

    Args:
        anchors_per_cell: number of anchors of a cell.
        maps: (vertical step, horizontal step, rows, columns) of each map, steps in input pixels.
    """
    count = anchors_per_cell * sum(rows * columns for _, _, rows, columns in maps)
    scalars = (anchors_per_cell, *(number for parameters in maps for number in parameters))
    return Launch((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), scalars)


PREBUILT_KERNELS = tuple(grid_anchors_kernel(levels) for levels in (1, MAX_LEVELS))

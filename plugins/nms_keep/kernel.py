"""Compilation and launch of the kernels in `nms_keep.cu`."""

from typing import Literal

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 1024
# Maximum boxes per set: each thread keeps the state of 16 boxes.
MAX_BOXES = 16 * _THREADS

# Boxes per tile, one for each bit of an int64. Threads per block of `nms_overlaps`.
_TILE, _TILE_THREADS = 64, 256

KernelName = Literal["nms_keep", "nms_overlaps", "nms_select"]


def nms_keep_kernel(
    iou_threshold: float,
    max_keep: int,
    keep_type: Literal["bool", "int"] = "bool",
    name: KernelName = "nms_keep",
) -> Kernel:
    """Return a kernel of `maskrcnn::nms_keep`.

    Args:
        iou_threshold: boxes with a larger IoU are suppressed.
        max_keep: maximum number of kept boxes per set. 0: no limit.
        keep_type: C++ type of the output's elements; an element is true if its box is kept.
        name: `nms_keep` computes the whole operation. `nms_overlaps` and then `nms_select` compute
            the same in two launches.
    """
    constants = (
        ("IOU_THRESHOLD", iou_threshold),
        ("MAX_KEEP", max_keep),
        ("KEEP", keep_type),
        ("THREADS", _THREADS),
    )
    return Kernel("nms_keep/nms_keep.cu", name, constants)


def nms_keep_launch(sets: int, boxes: int) -> Launch:
    """Return the grid, block and scalar arguments of `nms_keep` and of `nms_select`.

    - `nms_keep` reads boxes [sets, boxes, 4] float32 and classes [sets, boxes] int64.
    - `nms_select` reads the classes and the output of `nms_overlaps`.

    The output of both is [sets, boxes], true for kept boxes. Its type is the argument `keep_type`
    of `nms_keep_kernel`.
    """
    return Launch((sets, 1, 1), (_THREADS, 1, 1), (boxes,))


def number_of_tiles(boxes: int) -> int:
    """Return the number of tiles of a set. A tile has 64 boxes; the last one may have fewer."""
    return -(-boxes // _TILE)


def overlaps_launch(sets: int, boxes: int) -> Launch:
    """Return the grid, block and scalar arguments of `nms_overlaps`.

    Inputs are boxes [sets, boxes, 4] float32 and classes [sets, boxes] int64. The output is
    suppressors [sets, tiles, boxes] int64. A tile is 64 consecutive boxes. Entry [s, t, b] is a bit
    mask for tile t: bit i is set if box b is suppressed when box 64 * t + i is kept.
    """
    tiles = number_of_tiles(boxes)
    return Launch((tiles, tiles, sets), (_TILE_THREADS, 1, 1), (boxes,))


_PREBUILT_NAMES: tuple[KernelName, ...] = ("nms_overlaps", "nms_select")
PREBUILT_KERNELS = (
    *(
        nms_keep_kernel(iou_threshold, max_keep, "bool", name)
        for iou_threshold, max_keep in ((0.7, 1000), (0.7, 2000), (0.5, 100))
        for name in _PREBUILT_NAMES
    ),
    nms_keep_kernel(0.5, 0, "int"),
)

"""Compilation and launch of `polygon_mask_targets.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 128
# Scaled corner coordinates are clamped to plus or minus this multiple of the target's side.
REACH = 100


def polygon_targets_kernel(side: int) -> Kernel:
    """Return the kernel that rasterises polygons into mask targets of `side` x `side`."""
    constants = (("REACH", REACH * side), ("SIDE", side), ("THREADS", _THREADS))
    return Kernel(
        "polygon_mask_targets/polygon_mask_targets.cu", "mask_targets_from_polygons", constants
    )


def polygon_targets_launch(rois: int, instances: int) -> Launch:
    """Return the grid, block and scalar arguments of `polygon_targets_kernel`.

    The kernel's inputs are, in this order, for R rings (polygons) with V vertices in total:

    - vertices [V, 2] float32;
    - offsets of the rings into the vertices, [R + 1] int64;
    - offsets of the instances into the rings, [instances + 1] int64;
    - RoI boxes [rois, 4] float32;
    - instance index of each RoI, [rois] int64.

    The output is mask targets [rois, side, side] float32.
    """
    return Launch((rois, 1, 1), (_THREADS, 1, 1), (instances,))


PREBUILT_KERNELS = (polygon_targets_kernel(28), polygon_targets_kernel(56))

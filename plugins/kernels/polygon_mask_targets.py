"""Compilation and launch of `polygon_mask_targets.cu`."""

from ..compilation import Kernel, Launch

_THREADS = 128
REACH = 100
"""Corners farther away than so many times the side of the targets are moved in."""


def polygon_targets_kernel(side: int) -> Kernel:
    """The kernel that draws polygons into M x M targets."""
    constants = (("REACH", REACH * side), ("SIDE", side), ("THREADS", _THREADS))
    return Kernel("polygon_mask_targets.cu", "mask_targets_from_polygons", constants)


def polygon_targets_launch(rois: int, instances: int) -> Launch:
    """Launch for vertices [V, 2], ring_offsets, instance_offsets, boxes [K, 4] and matched [K].

    Vertices and boxes are float32, what else goes in is int64; the output is targets [K, M, M]
    float32.
    """
    return Launch((rois, 1, 1), (_THREADS, 1, 1), (instances,))


VARIANTS = (polygon_targets_kernel(28), polygon_targets_kernel(56))

"""Compilation and launch of `nms_keep.cu`."""

from typing import Literal

from ..compilation import Kernel, Launch

_THREADS = 1024
MAX_BOXES = 16 * _THREADS
"""Boxes a set: the kernel remembers 16 a thread."""


def nms_keep_kernel(
    iou_threshold: float, max_keep: int, keep_type: Literal["bool", "int"] = "bool"
) -> Kernel:
    """The kernel that suppresses beyond an IoU and keeps at most so many; 0, without limit."""
    constants = (
        ("IOU_THRESHOLD", iou_threshold),
        ("MAX_KEEP", max_keep),
        ("KEEP", keep_type),
        ("THREADS", _THREADS),
    )
    return Kernel("nms_keep.cu", "nms_keep", constants)


def nms_keep_launch(sets: int, boxes: int) -> Launch:
    """Launch for boxes [N, K, 4] float32 and classes [N, K] int64 -> keep [N, K], 1 or 0."""
    return Launch((sets, 1, 1), (_THREADS, 1, 1), (boxes,))


VARIANTS = (
    nms_keep_kernel(0.7, 1000),
    nms_keep_kernel(0.7, 2000),
    nms_keep_kernel(0.5, 100),
    nms_keep_kernel(0.5, 0, "int"),
)

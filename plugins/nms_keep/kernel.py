"""Compilation and launch of `nms_keep.cu`."""

from typing import Literal

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 1024
# Maximum boxes per set: each thread keeps the state of 16 boxes.
MAX_BOXES = 16 * _THREADS


def nms_keep_kernel(
    iou_threshold: float, max_keep: int, keep_type: Literal["bool", "int"] = "bool"
) -> Kernel:
    """Return the kernel for these attributes of the operation; `keep_type` is the output's type."""
    constants = (
        ("IOU_THRESHOLD", iou_threshold),
        ("MAX_KEEP", max_keep),
        ("KEEP", keep_type),
        ("THREADS", _THREADS),
    )
    return Kernel("nms_keep/nms_keep.cu", "nms_keep", constants)


def nms_keep_launch(sets: int, boxes: int) -> Launch:
    """Return the grid, block and scalar arguments of the kernel.

    Inputs are boxes [sets, boxes, 4] float32 and classes [sets, boxes] int64. The output is keep
    [sets, boxes].
    """
    return Launch((sets, 1, 1), (_THREADS, 1, 1), (boxes,))


PREBUILT_KERNELS = (
    nms_keep_kernel(0.7, 1000),
    nms_keep_kernel(0.7, 2000),
    nms_keep_kernel(0.5, 100),
    nms_keep_kernel(0.5, 0, "int"),
)

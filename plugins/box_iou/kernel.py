"""Compilation and launch of `box_iou.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 256
# Number of `boxes` that a thread compares with one of `others`.
_ROWS = 16

BOX_IOU = Kernel("box_iou/box_iou.cu", "box_iou", (("ROWS", _ROWS), ("THREADS", _THREADS)))


def box_iou_launch(batch: int, rows: int, columns: int, *, shared: bool) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `BOX_IOU` for B = `batch` images.

    Inputs are two sets of boxes, [B, rows, 4] and [B, columns, 4], or [1, columns, 4] if `shared`.
    Boxes are xyxy. The output is the IoU [B, rows, columns] of all pairs. All are float32.
    """
    grid = (-(-columns // _THREADS), -(-rows // _ROWS), batch)
    return Launch(grid, (_THREADS, 1, 1), (rows, columns, 0 if shared else columns))


PREBUILT_KERNELS = (BOX_IOU,)

"""Compilation and launch of `box_iou.cu`."""

from ..compilation import Kernel, Launch

_THREADS = 256
_ROWS = 16

BOX_IOU = Kernel("box_iou.cu", "box_iou", (("ROWS", _ROWS), ("THREADS", _THREADS)))


def box_iou_launch(batch: int, rows: int, columns: int, *, shared: bool) -> Launch:
    """Launch for boxes [B, G, 4] and others [B, N, 4], or [1, N, 4] if shared -> [B, G, N]."""
    grid = (-(-columns // _THREADS), -(-rows // _ROWS), batch)
    return Launch(grid, (_THREADS, 1, 1), (rows, columns, 0 if shared else columns))


VARIANTS = (BOX_IOU,)

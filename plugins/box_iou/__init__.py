"""`maskrcnn::box_iou`: pairwise intersection over union of two sets of boxes."""

from .operation import box_iou

__all__ = ["box_iou"]

"""`maskrcnn::nms_keep`: exact greedy non-maximum suppression in padded sets of boxes."""

from .operation import nms_keep

__all__ = ["nms_keep"]

"""`maskrcnn::nms_keep`: exact greedy non-maximum suppression of a batch of padded sets."""

from .operation import nms_keep

__all__ = ["nms_keep"]

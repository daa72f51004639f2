"""`maskrcnn::match_boxes`: matching of candidates to ground-truth boxes by IoU."""

from .operation import match_boxes

__all__ = ["match_boxes"]

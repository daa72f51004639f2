"""`maskrcnn::grid_anchors`: anchor boxes of all cells of a map or of a feature pyramid."""

from .operation import grid_anchors, grid_anchors_in_torch

__all__ = ["grid_anchors", "grid_anchors_in_torch"]

"""`maskrcnn::grid_anchors`: anchor boxes of all cells of one or more feature maps."""

from .operation import grid_anchors, grid_anchors_in_torch

__all__ = ["grid_anchors", "grid_anchors_in_torch"]

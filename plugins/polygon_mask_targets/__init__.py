"""`maskrcnn::mask_targets_from_polygons`: mask targets rasterised from polygons."""

from .operation import mask_targets_from_polygons

__all__ = ["mask_targets_from_polygons"]

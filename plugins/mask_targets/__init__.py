"""`maskrcnn::mask_targets_from_crops`: ground-truth masks resampled within RoIs."""

from .operation import mask_targets_from_crops

__all__ = ["mask_targets_from_crops"]

"""Mask targets: ground-truth masks resampled within RoIs, from pixels or run lengths."""

from .operation import mask_targets_from_crops, mask_targets_from_rle, rois_by_owner

__all__ = ["mask_targets_from_crops", "mask_targets_from_rle", "rois_by_owner"]

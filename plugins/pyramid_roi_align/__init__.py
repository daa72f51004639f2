"""`maskrcnn::pyramid_roi_align`: RoIAlign over a feature pyramid for a batch of images."""

from .operation import pyramid_roi_align, pyramid_roi_align_backward

__all__ = ["pyramid_roi_align", "pyramid_roi_align_backward"]

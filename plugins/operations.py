"""Operations of exported detection programs. Importing this module registers them with torch."""

from .box_deltas import decode_boxes
from .fused_convolution import convolution_relu, pointwise_convolution
from .grid_anchors import grid_anchors
from .nms_keep import nms_keep
from .pyramid_roi_align import pyramid_roi_align
from .stable_top_k import stable_top_k

__all__ = [
    "convolution_relu",
    "decode_boxes",
    "grid_anchors",
    "nms_keep",
    "pointwise_convolution",
    "pyramid_roi_align",
    "stable_top_k",
]

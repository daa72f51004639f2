"""Custom operations in exported torch programs. Importing this module registers them with torch."""

from .box_deltas import decode_boxes
from .fused_convolution import convolution_relu, expand_reduce, pointwise_convolution
from .grid_anchors import grid_anchors
from .nms_keep import nms_keep
from .pyramid_roi_align import pyramid_roi_align
from .resnet_stem import resnet_stem
from .stable_top_k import stable_top_k

__all__ = [
    "convolution_relu",
    "decode_boxes",
    "expand_reduce",
    "grid_anchors",
    "nms_keep",
    "pointwise_convolution",
    "pyramid_roi_align",
    "resnet_stem",
    "stable_top_k",
]

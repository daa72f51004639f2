"""Custom operations in exported torch programs. Importing this module registers them with torch."""

from .block_transition import block_transition
from .box_deltas import decode_boxes
from .class_logits import class_logits
from .fused_convolution import (
    convolution_relu,
    cudnn_convolution,
    expand_reduce,
    gemm_convolution,
    pointwise_convolution,
)
from .grid_anchors import grid_anchors
from .nms_keep import nms_keep
from .pyramid_roi_align import pyramid_roi_align
from .resnet_stem import resnet_stem
from .stable_top_k import stable_top_k, top_k_of_parts

__all__ = [
    "block_transition",
    "class_logits",
    "convolution_relu",
    "cudnn_convolution",
    "decode_boxes",
    "expand_reduce",
    "gemm_convolution",
    "grid_anchors",
    "nms_keep",
    "pointwise_convolution",
    "pyramid_roi_align",
    "resnet_stem",
    "stable_top_k",
    "top_k_of_parts",
]

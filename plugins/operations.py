"""Custom operations in exported torch programs. Importing this module registers them with torch."""

from . import (  # noqa: F401
    box_deltas,
    class_logits,
    fused_convolution,
    grid_anchors,
    nms_keep,
    pyramid_roi_align,
    resnet_stem,
    stable_top_k,
)

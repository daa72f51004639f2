"""`maskrcnn::fused_bottleneck`: transition between two residual blocks with few channels."""

from .operation import can_fuse_bottleneck, fused_bottleneck

__all__ = ["can_fuse_bottleneck", "fused_bottleneck"]

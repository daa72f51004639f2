"""`maskrcnn::block_transition`: fused end of a residual block and start of the next one."""

from .operation import block_transition, can_fuse_transition

__all__ = ["block_transition", "can_fuse_transition"]

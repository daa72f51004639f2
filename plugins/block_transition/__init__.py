"""`maskrcnn::block_transition`: end of a residual block, and first convolution of the next one."""

from .operation import block_transition, can_fuse_transition

__all__ = ["block_transition", "can_fuse_transition"]

"""`maskrcnn::block_transition`: transition between two residual blocks with few channels."""

from .operation import block_transition, can_fuse_transition

__all__ = ["block_transition", "can_fuse_transition"]

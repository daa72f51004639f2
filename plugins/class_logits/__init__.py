"""`maskrcnn::class_logits`: logits of one class per instance, for all cells of its mask."""

from .operation import class_logits

__all__ = ["class_logits"]

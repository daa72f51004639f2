"""`maskrcnn::class_logits`: mask logits of each instance, for the instance's class only."""

from .operation import class_logits

__all__ = ["class_logits"]

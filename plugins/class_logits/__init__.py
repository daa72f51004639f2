"""Mask logits of each instance, for the instance's class only.

`maskrcnn::class_logits` takes features after their ReLU. `maskrcnn::relu_class_logits` first adds a
bias to the features and applies a ReLU. `maskrcnn::upsampled_class_logits` first computes a
transposed convolution and a ReLU. Only `relu_class_logits` has a gradient.
"""

from .operation import class_logits, relu_class_logits
from .upsampled import upsampled_class_logits

__all__ = ["class_logits", "relu_class_logits", "upsampled_class_logits"]

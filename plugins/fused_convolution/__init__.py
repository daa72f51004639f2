"""`maskrcnn::convolution_relu` and `maskrcnn::pointwise_convolution`: fused convolutions."""

from .operation import convolution_relu, pointwise_convolution

__all__ = ["convolution_relu", "pointwise_convolution"]

"""`maskrcnn::convolution_relu`, `pointwise_convolution` and `expand_reduce`: fused convolutions."""

from .expand_reduce import expand_reduce
from .operation import convolution_relu, pointwise_convolution

__all__ = ["convolution_relu", "expand_reduce", "pointwise_convolution"]

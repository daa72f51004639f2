"""Convolutions that are fused with the bias, the shortcut and the ReLU after them.

The operations are in torch's namespace `maskrcnn`. `convolution_relu`, `cudnn_convolution`,
`pointwise_convolution` and `gemm_convolution` compute one convolution each. `expand_reduce`
computes two successive 1x1 convolutions.
"""

from .expand_reduce import expand_reduce
from .library_operations import cudnn_convolution, gemm_convolution
from .operation import convolution_relu, pointwise_convolution

__all__ = [
    "convolution_relu",
    "cudnn_convolution",
    "expand_reduce",
    "gemm_convolution",
    "pointwise_convolution",
]

"""Convolutions that are fused with the bias, the shortcut and the ReLU after them.

The operations are in torch's namespace `maskrcnn`. `convolution_relu`, `cudnn_convolution`,
`pointwise_convolution` and `gemm_convolution` compute one convolution each. `block_transition`
computes two or three 1x1 convolutions between two 3x3 convolutions of a ResNet, optionally together
with the first of these two.
"""

from .block_transition import block_transition
from .library_operations import cudnn_convolution, gemm_convolution
from .operation import convolution_relu, pointwise_convolution

__all__ = [
    "block_transition",
    "convolution_relu",
    "cudnn_convolution",
    "gemm_convolution",
    "pointwise_convolution",
]

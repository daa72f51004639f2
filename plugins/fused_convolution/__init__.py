"""Convolutions that are fused with the bias, the shortcut and the ReLU after them.

The operations are in torch's namespace `maskrcnn`. `convolution_relu`, `cudnn_convolution`,
`pointwise_convolution`, `gemm_convolution` and `upsampling_convolution` compute one convolution
each. `pointwise_convolution` calls `upsampling_convolution` in some cases. `block_transition`
computes the end of a residual block and the start of the next one: two or three 1x1 convolutions,
and optionally the 3x3 convolution before them.
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

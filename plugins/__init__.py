"""Custom torch operations. All implementations of an operation follow one specification.

On a GPU, an operation raises ValueError if an argument has another dtype or shape than documented.
The operations in `fused_convolution` do not check their arguments.
"""

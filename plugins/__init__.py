"""Custom torch operations. All implementations of an operation follow one specification.

On a GPU, an operation raises ValueError if an argument has another dtype or shape than documented.
In `fused_convolution`, only `block_transition` and `upsampling_convolution` check their arguments.
"""

"""Custom torch operations, each with one contract and several implementations.

CUDA implementations raise ValueError if an argument has another dtype or shape than documented.
"""

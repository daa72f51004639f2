"""Compilation and launch of CUDA kernels, and their shared headers."""

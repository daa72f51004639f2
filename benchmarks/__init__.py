"""Benchmarks: speed of inference, serving, training and kernels, accuracy, and the quickstart."""

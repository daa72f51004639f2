"""Benchmarks of inference, serving, training, kernels, model accuracy and the quickstart."""

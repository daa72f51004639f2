"""Engines: processing steps of batches on the CPU and the GPU, and their worker processes."""

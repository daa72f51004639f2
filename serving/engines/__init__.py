"""Engines that compute batches in worker processes, on the GPU or the CPU."""

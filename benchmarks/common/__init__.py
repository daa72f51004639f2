"""Shared parts of all benchmarks: timing, processes, images, records, torchvision baseline."""

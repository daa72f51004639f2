"""Compression of run lengths to COCO RLE strings."""

from .operation import compress_runs

__all__ = ["compress_runs"]

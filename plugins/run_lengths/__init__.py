"""Compression of run lengths to COCO RLE strings, without torch."""

from .operation import coco_strings, strings_from_runs

__all__ = ["coco_strings", "strings_from_runs"]

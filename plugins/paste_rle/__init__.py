"""Pasting of mask probabilities into images as COCO run lengths."""

from .operation import paste_rle

__all__ = ["paste_rle"]

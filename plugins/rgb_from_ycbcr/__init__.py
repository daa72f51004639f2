"""Conversion of decoded JPEG planes to RGB."""

from .operation import rgb_from_ycbcr

__all__ = ["rgb_from_ycbcr"]

"""Resizing of images of any sizes into a padded batch."""

from .operation import resize_pad

__all__ = ["resize_pad"]

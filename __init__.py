"""Mask R-CNN from a COCO-format data set to a served model on NVIDIA GPUs."""

__version__ = "0.1.0"

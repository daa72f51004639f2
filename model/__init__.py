"""Mask R-CNN model, and the file formats that training, export and serving share."""

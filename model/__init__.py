"""Mask R-CNN model, with the formats shared by training, export and serving."""

"""The Mask R-CNN model, and what training, export and serving agree on."""

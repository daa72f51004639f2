"""Generate synthetic data sets: images of textured shapes with COCO annotations."""

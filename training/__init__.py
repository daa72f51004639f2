"""Train and evaluate Mask R-CNN on data sets in COCO format."""

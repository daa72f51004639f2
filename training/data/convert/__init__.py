"""Convert data sets of other formats to COCO format."""

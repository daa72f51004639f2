"""Read data sets in COCO format: annotation files, masks and folder layouts."""

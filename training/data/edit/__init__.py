"""Split, merge and filter COCO annotation files."""

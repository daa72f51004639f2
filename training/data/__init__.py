"""Data sets in COCO format: reading, drawing, batching."""

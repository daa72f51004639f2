"""Download, convert, draw, inspect and load data sets in COCO format."""

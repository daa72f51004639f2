"""Download, generate, convert, edit, inspect and load data sets in COCO format."""

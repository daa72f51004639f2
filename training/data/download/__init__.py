"""Download, verify and extract COCO."""

"""Output files of detections: COCO JSON, NumPy arrays and annotated images."""

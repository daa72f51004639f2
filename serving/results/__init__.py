"""What detections are written as: COCO results, arrays and pictures."""

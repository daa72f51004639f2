"""Training: from a COCO-format data set to a run of checkpoints, log and metrics."""

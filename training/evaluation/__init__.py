"""Evaluate models with COCO metrics, during and after training."""

"""Serialisation of detections as protobuf messages."""

from .operation import ClassTable, DetectionBatch, detection_messages

__all__ = ["ClassTable", "DetectionBatch", "detection_messages"]

"""`maskrcnn::encode_boxes` and `maskrcnn::decode_boxes`: conversion of boxes to deltas and back."""

from .operation import decode_boxes, decode_in_torch, encode_boxes

__all__ = ["decode_boxes", "decode_in_torch", "encode_boxes"]

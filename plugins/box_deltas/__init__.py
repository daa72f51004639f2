"""`maskrcnn::encode_boxes` and `maskrcnn::decode_boxes`: conversion of boxes to deltas and back."""

from .operation import are_large, decode_boxes, encode_boxes

__all__ = ["are_large", "decode_boxes", "encode_boxes"]

"""Names and shapes that the model, the exported graph and the server agree on. Needs no torch.

Letters: B images, D detections, H and W pixels of a shape bucket, M the side of a mask.
Boxes are xyxy in input pixels, that is in pixels of the resized image before padding.
"""

from typing import NamedTuple

INPUT_NAMES = ("images", "image_sizes")
"""images [B, 3, H, W] RGB in 0..255; image_sizes [B, 2] int64 (height, width) before padding."""

OUTPUT_NAMES = ("num_detections", "boxes", "scores", "labels", "masks")
"""num_detections [B] int64, boxes [B, D, 4], scores [B, D], labels [B, D] int64 (1 is the first
class), masks [B, D, M, M] probabilities. Rows from num_detections on are zero."""

OPSET_DOMAIN, OPSET_VERSION = "maskrcnn", 1
"""ONNX domain of the custom operations, and its version."""

MAX_PIXELS = 64_000_000
"""Pixels that an image may have where nobody says otherwise."""


class ShapeBucket(NamedTuple):
    """A fixed input size in pixels into which images are resized and padded."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"

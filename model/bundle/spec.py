"""Names and shapes of the inputs and outputs of the model, the exported graph and the server.

This module does not import torch.

Dimensions: B images, D detections, H x W pixels of a shape bucket (fixed input size), M x M samples
of a mask. Boxes are xyxy in input pixels: pixels of the resized image before padding.
"""

from typing import Literal, NamedTuple

# Rule for resizing images. It must be the rule that a model was trained with:
# - pillow: side lengths are rounded down; Pillow resizes bytes, bilinear and antialiased.
# - detectron2: side lengths are rounded to the nearest pixel; pixels as with `pillow`.
# - torchvision: side lengths are rounded down; floats are interpolated without antialiasing.
ResizeRule = Literal["pillow", "detectron2", "torchvision"]

# images [B, 3, H, W] RGB in 0..255; image_sizes [B, 2] int64 (height, width) before padding.
INPUT_NAMES = ("images", "image_sizes")

# num_detections [B] int64, boxes [B, D, 4], scores [B, D], labels [B, D] int64 (1 is the first
# class), masks [B, D, M, M] probabilities. After the first num_detections rows, all rows are zero.
OUTPUT_NAMES = ("num_detections", "boxes", "scores", "labels", "masks")

# ONNX domain and opset version of the custom operations.
OPSET_DOMAIN, OPSET_VERSION = "maskrcnn", 1

# Sides of input sizes are multiples of this number of pixels: the stride of the last stage (res5)
# of a ResNet without dilation.
BUCKET_STEP = 32

# Default maximum number of pixels of an image.
MAX_PIXELS = 64_000_000


class ShapeBucket(NamedTuple):
    """Fixed input size of the model: height and width in pixels to which images are padded."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"

    @property
    def is_multiple_of_step(self) -> bool:
        """Whether both sides are multiples of `BUCKET_STEP` (32 pixels), and not zero."""
        return min(self) >= BUCKET_STEP and not any(side % BUCKET_STEP for side in self)

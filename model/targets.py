"""Ground truth of a batch, padded to one shape."""

from typing import NamedTuple

from torch import Tensor


class Targets(NamedTuple):
    """Ground-truth instances of a batch of images; G is the largest number in any of them."""

    boxes: Tensor
    """[B, G, 4] float32, xyxy in input pixels."""
    labels: Tensor
    """[B, G] int64; 1 is the first class, 0 marks padding."""
    masks: Tensor
    """uint8, 0 or 1: [B, G, H, W] at input size or, where `roi.mask_crop_size` is S, [B, G, S, S],
    each mask cropped to its box and resized."""

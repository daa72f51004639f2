"""Ground truth of a training batch."""

from typing import NamedTuple

from torch import Tensor


class Targets(NamedTuple):
    """Ground truth of B images, padded to G instances per image (the maximum in the batch)."""

    # [B, G, 4] float32, xyxy in input pixels.
    boxes: Tensor
    # [B, G] int64; 1 is the first class, 0 marks padding.
    labels: Tensor
    # uint8, 0 or 1. [B, G, S, S] if `roi.mask_crop_size` is S: masks cropped to their boxes and
    # resized. [B, G, H, W] at input size if `roi.mask_crop_size` is None.
    masks: Tensor

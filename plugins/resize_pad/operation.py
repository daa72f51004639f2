"""Resizing of images of any sizes into a padded batch.

Specification of all implementations: an image is resized bilinearly with antialiasing, and padded
with zeros at the right and bottom. Pixel values equal those of `PIL.Image.resize`.
"""

import math
from collections.abc import Sequence

import numpy as np
import PIL
import torch
from PIL.Image import Resampling, fromarray
from torch import Tensor

from ..runtime.arguments import check_argument
from ..runtime.launching import launch_kernel, table_on_device
from .kernel import (
    RESIZE_PAD,
    RESIZE_WEIGHTS,
    resize_pad_launch,
    resize_weights_launch,
    table_shape,
)

_CHANNELS = 3
# Whether Pillow chooses along which axis it resizes first, which affects rounding. Versions before
# 13 always resize horizontally first.
_PILLOW_CHOOSES_ORDER = int(PIL.__version__.partition(".")[0]) >= 13


def resize_pad(images: Sequence[Tensor], sizes: Sequence[int], height: int, width: int) -> Tensor:
    """Resize images and pad them to one size.

    Args:
        images: B >= 1 images [3, h, w] uint8 of any strides. An image without pixels becomes
            black.
        sizes: [2 * B], height and width in pixels of each image after resizing.
        height: height in pixels after padding, at least that of each resized image.
        width: width in pixels after padding, at least that of each resized image.

    Returns:
        [B, 3, height, width] uint8.

    Raises:
        ValueError: an image is not [3, h, w] uint8, the images are on several devices, `sizes` does
            not have two entries per image, or an entry is less than 1 or larger than `height` or
            `width`.
    """
    pairs = _checked_sizes(images, sizes, height, width)
    if images[0].is_cuda:
        return _resized_by_kernel(images, pairs, height, width)
    batch = images[0].new_zeros(len(images), _CHANNELS, height, width)
    for row, image, size in zip(batch, images, pairs, strict=True):
        if image.numel():
            row[:, : size[0], : size[1]] = _resized(image, size)
    return batch


def _resized_by_kernel(
    images: Sequence[Tensor], pairs: Sequence[tuple[int, int]], height: int, width: int
) -> Tensor:
    rows = [
        (
            *(image.data_ptr(), *image.stride(), *image.shape[1:]),
            *(size if image.numel() else (0, 0)),
            _is_vertical_first(image, size),
        )
        for image, size in zip(images, pairs, strict=True)
    ]
    table = table_on_device(rows, images[0].device)
    batch = images[0].new_empty(len(images), _CHANNELS, height, width)
    taps = max(map(_taps, images, pairs))
    shape = len(images), taps, max(height, width)
    weights = table.new_empty(table_shape(*shape), dtype=torch.int32)
    launch_kernel(RESIZE_WEIGHTS, resize_weights_launch(*shape), [table], [weights])
    launch = resize_pad_launch(*shape, height, width)
    launch_kernel(RESIZE_PAD, launch, [table, weights], [batch])
    return batch


def _checked_sizes(
    images: Sequence[Tensor], sizes: Sequence[int], height: int, width: int
) -> list[tuple[int, int]]:
    """Check the arguments, and return height and width of each resized image."""
    if len(sizes) != 2 * len(images):
        raise ValueError(
            "resize_pad needs two numbers in `sizes` per image (height and width), not "
            f"{len(sizes)} numbers for {len(images)} images"
        )
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))
    for image, size in zip(images, pairs, strict=True):
        check_argument("images", image, torch.uint8, (_CHANNELS, -1, -1))
        if image.device != images[0].device:
            raise ValueError(
                f"images must be on one device, not on {images[0].device} and {image.device}"
            )
        if not (0 < size[0] <= height and 0 < size[1] <= width):
            raise ValueError(
                f"an image of {image.shape[1]}x{image.shape[2]} pixels (height x width) cannot be "
                f"resized to {size[0]}x{size[1]} in a batch of {height}x{width}; each side must "
                "have at least 1 pixel and fit into the batch"
            )
    return pairs


def _is_vertical_first(image: Tensor, size: tuple[int, int]) -> bool:
    """Return whether Pillow resizes an image to `size` vertically first, then horizontally.

    Pillow 13 and later do this if resizing removes rows, and the number of removed rows is more
    than twice the number of removed columns. Older versions always resize horizontally first.
    """
    rows, columns = (old - new for old, new in zip(image.shape[1:], size, strict=True))
    return _PILLOW_CHOOSES_ORDER and rows > max(0, 2 * columns)


def _taps(image: Tensor, size: tuple[int, int]) -> int:
    """Return an upper bound for the number of source pixels that contribute to a resized pixel.

    Pixels are counted along one axis. The bound holds for both axes.
    """
    scale = max(1.0, *(old / new for old, new in zip(image.shape[1:], size, strict=True)))
    return 2 * math.ceil(scale) + 1


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    pixels = fromarray(image.permute(1, 2, 0).contiguous().numpy())
    resized = pixels.resize(size[::-1], Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)

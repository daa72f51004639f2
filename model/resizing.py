"""Resizing and padding of decoded images on the CPU, by a model's resize rule.

Training, serving and prediction share these functions, so that they see the same pixels. This
module does not import torch.
"""

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling, fromarray

from .bundle.spec import ResizeRule, ShapeBucket
from .image_limits import ImageError

# Number of rows interpolated at a time. For whole images, intermediate results would take more
# memory.
_STRIP_ROWS = 32

# Pixels [h, w, 3] RGB in 0..255: float32 after resizing by the rule `torchvision`, else uint8.
Pixels = NDArray[np.uint8 | np.float32]


def pixel_dtype(rule: ResizeRule) -> type[np.uint8] | type[np.float32]:
    """Return the dtype of images resized by a rule: float32 for `torchvision`, otherwise uint8."""
    return np.float32 if rule == "torchvision" else np.uint8


def resized_size(
    height: int, width: int, min_size: int, max_size: int, rule: ResizeRule = "pillow"
) -> tuple[int, int]:
    """Return the height and width in pixels that an image has after resizing.

    The aspect ratio is kept. The shorter side becomes `min_size`, unless the longer side would
    exceed `max_size`. In this case, the longer side becomes `max_size`.

    With the rule `detectron2`, sides are rounded to the nearest pixel. With the other rules, they
    are rounded down, as in torchvision. The result can then be a pixel shorter than `min_size` or
    `max_size`, because a float product such as 161 * (800 / 161) can be below 800.
    """
    shorter, longer = min(height, width), max(height, width)
    if rule == "detectron2":
        # Keep detectron2's order of operations, because the rounding of products close to .5
        # depends on it.
        sides = min_size * 1.0, min_size / shorter * longer
        if sides[1] > max_size:
            sides = sides[0] * (max_size / sides[1]), sides[1] * (max_size / sides[1])
        small, large = (max(1, int(side + 0.5)) for side in sides)
        return (small, large) if height < width else (large, small)
    scale = min(min_size / shorter, max_size / longer)
    return max(1, math.floor(height * scale)), max(1, math.floor(width * scale))


def smallest_bucket(height: int, width: int, buckets: Sequence[ShapeBucket]) -> ShapeBucket:
    """Return the bucket (input size) of smallest area that holds `height` x `width` pixels.

    Raises:
        ImageError: the image fits no bucket.
    """
    fitting = [b for b in buckets if b.height >= height and b.width >= width]
    if not fitting:
        raise ImageError(
            f"the image, resized to {height}x{width} pixels (height x width), fits into none of "
            f"the model's input sizes: {', '.join(map(str, buckets))}"
        )
    return min(fitting, key=lambda b: b.height * b.width)


@overload
def resize_image(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]: ...


@overload
def resize_image(image: NDArray[np.uint8], height: int, width: int, rule: ResizeRule) -> Pixels: ...


def resize_image(
    image: NDArray[np.uint8], height: int, width: int, rule: ResizeRule = "pillow"
) -> Pixels:
    """Resize an image [H, W, 3] to [height, width, 3], bilinearly.

    With the rule `torchvision`, the result is float32 without antialiasing. With `pillow` and
    `detectron2`, it is antialiased and rounded to uint8.
    """
    if rule == "torchvision":
        return _interpolate(image, height, width)
    if image.shape[:2] == (height, width):
        return image
    return np.array(fromarray(image).resize((width, height), Resampling.BILINEAR))


def pad_to_bucket(image: NDArray[Any], bucket: ShapeBucket) -> NDArray[Any]:
    """Pad an image [H, W, 3] with zeros at the right and bottom to a bucket (input size).

    Returns:
        [3, bucket.height, bucket.width].
    """
    height, width = image.shape[:2]
    padded = np.zeros((3, *bucket), image.dtype)
    padded[:, :height, :width] = image.transpose(2, 0, 1)
    return padded


def _interpolate(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float32]:
    """Resize an image [H, W, 3] to [height, width, 3] float32, bilinear without antialiasing.

    The result equals that of `torch.nn.functional.interpolate` with `align_corners=False`.
    """
    if image.shape[:2] == (height, width):
        return image.astype(np.float32)
    top, bottom, down = _neighbours(image.shape[0], height)
    left, right, across = _neighbours(image.shape[1], width)
    down, across = down[:, None, None], across[:, None]

    def blended_rows(rows: NDArray[np.intp]) -> NDArray[np.float32]:
        lines = image.take(rows, axis=0)
        first = lines.take(left, axis=1).astype(np.float32)
        step = lines.take(right, axis=1) - first
        step *= across
        first += step
        return first

    resized = np.empty((height, width, 3), np.float32)
    for start in range(0, height, _STRIP_ROWS):
        strip = slice(start, start + _STRIP_ROWS)
        upper, lower = blended_rows(top[strip]), blended_rows(bottom[strip])
        lower -= upper
        lower *= down[strip]
        np.add(upper, lower, out=resized[strip])
    return resized


def _neighbours(
    size: int, resized: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """Return the source pixels between which each resized pixel is interpolated along an axis.

    The axis has `size` source pixels and `resized` resized pixels. Return three arrays [resized]:
    index of the first source pixel, index of the second source pixel, weight of the second.
    """
    # To get torch's values, round as torch does: round the scale to float32, and round the position
    # only once, after multiplication and subtraction.
    scale = float(np.float32(size) / np.float32(resized))
    positions = ((np.arange(resized) + 0.5) * scale - 0.5).clip(0).astype(np.float32)
    first = np.minimum(positions.astype(np.intp), size - 1)
    weights = (positions - first.astype(np.float32)).clip(0, 1)
    return first, np.minimum(first + 1, size - 1), weights

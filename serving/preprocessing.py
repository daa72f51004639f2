"""From an encoded image to one row of a batch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..model.images import (
    decode_image,
    pad_to_bucket,
    resize_image,
    resized_size,
    smallest_bucket,
)
from ..model.manifest import Preprocessing
from ..model.spec import ShapeBucket


class ModelInput(NamedTuple):
    """An image as the model takes it."""

    pixels: NDArray[np.uint8]
    """[3, H, W] RGB, padded to the bucket."""
    bucket: ShapeBucket
    size: tuple[int, int]
    """Height and width in pixels before padding."""
    source_size: tuple[int, int]
    """Height and width of the source image in pixels."""


def prepare_image(
    data: bytes, preprocessing: Preprocessing, buckets: Sequence[ShapeBucket], max_pixels: int
) -> ModelInput:
    """Decode an image, turn it upright, resize it and pad it into the smallest bucket.

    Raises:
        ImageError: the image cannot be used.
    """
    image = decode_image(data, max_pixels=max_pixels)
    height, width = image.shape[:2]
    size = resized_size(height, width, preprocessing.min_size, preprocessing.max_size)
    bucket = smallest_bucket(*size, buckets)
    return ModelInput(
        pad_to_bucket(resize_image(image, *size), bucket), bucket, size, (height, width)
    )

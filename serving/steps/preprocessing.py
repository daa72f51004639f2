"""From an encoded image to one row of a batch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...model.images import (
    ImageHeader,
    check_size,
    decode_image,
    pad_to_bucket,
    read_header,
    resize_image,
    resized_size,
    smallest_bucket,
)
from ...model.manifest import Preprocessing
from ...model.spec import ShapeBucket

SourceImage = bytes | NDArray[np.uint8]
"""An encoded image, or pixels [H, W, 3] RGB."""


class ModelInput(NamedTuple):
    """An image as the model takes it."""

    pixels: NDArray[np.uint8]
    """[3, H, W] RGB, padded to the bucket."""
    bucket: ShapeBucket
    size: tuple[int, int]
    """Height and width in pixels before padding."""
    source_size: tuple[int, int]
    """Height and width of the source image in pixels."""


class PlannedImage(NamedTuple):
    """An image of which it is known how the model will take it."""

    source: SourceImage
    header: ImageHeader
    bucket: ShapeBucket
    size: tuple[int, int]
    """Height and width in pixels that it is to be resized to."""

    @property
    def source_size(self) -> tuple[int, int]:
        """Height and width of the source image in pixels."""
        return self.header.size


def prepare_image(
    source: SourceImage,
    preprocessing: Preprocessing,
    buckets: Sequence[ShapeBucket],
    max_pixels: int,
) -> ModelInput:
    """Decode an image, turn it upright, resize it and pad it into the smallest bucket.

    Raises:
        ImageError: the image cannot be used.
    """
    if isinstance(source, bytes):
        image = decode_image(source, max_pixels=max_pixels)
        source_size = image.shape[0], image.shape[1]
    else:
        image = source
        source_size = _header_of_pixels(source, max_pixels).size
    bucket, size = _placement(source_size, preprocessing, buckets)
    return ModelInput(pad_to_bucket(resize_image(image, *size), bucket), bucket, size, source_size)


def plan_image(
    source: SourceImage,
    preprocessing: Preprocessing,
    buckets: Sequence[ShapeBucket],
    *,
    max_pixels: int,
    apply_orientation: bool,
) -> PlannedImage:
    """Find out from an image's header what `prepare_image` would do with it.

    Raises:
        ImageError: the image cannot be used.
    """
    if isinstance(source, bytes):
        header = read_header(source, max_pixels=max_pixels, apply_orientation=apply_orientation)
    else:
        header = _header_of_pixels(source, max_pixels)
    return PlannedImage(source, header, *_placement(header.size, preprocessing, buckets))


def resized_pixels(image: PlannedImage) -> NDArray[np.uint8]:
    """Decode an image that was planned, and resize it: [h, w, 3] RGB.

    Raises:
        ImageError: the image is damaged.
    """
    pixels = image.source
    if isinstance(pixels, bytes):
        height, width = image.source_size
        turned = image.header.orientation != 1
        pixels = decode_image(pixels, max_pixels=height * width, apply_orientation=turned)
    return resize_image(pixels, *image.size)


def _header_of_pixels(pixels: NDArray[np.uint8], max_pixels: int) -> ImageHeader:
    height, width = pixels.shape[:2]
    check_size(height, width, max_pixels)
    return ImageHeader((height, width), orientation=1, is_plain_jpeg=False)


def _placement(
    source_size: tuple[int, int], preprocessing: Preprocessing, buckets: Sequence[ShapeBucket]
) -> tuple[ShapeBucket, tuple[int, int]]:
    """The bucket of an image, and its height and width in there."""
    size = resized_size(*source_size, preprocessing.min_size, preprocessing.max_size)
    return smallest_bucket(*size, buckets), size

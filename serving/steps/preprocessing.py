"""Preprocessing on the CPU: decode, resize and pad images for the model."""

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...model.bundle.manifest import Preprocessing
from ...model.bundle.spec import ResizeRule, ShapeBucket
from ...model.image_decoding import ImageHeader, decode_image, read_header
from ...model.image_limits import check_size
from ...model.resizing import Pixels, pixel_dtype, resize_image, resized_size, smallest_bucket

# First version of the pickle protocol with out-of-band buffers.
_PROTOCOL_OF_BUFFERS: Final = 5

# An encoded image, or pixels [H, W, 3] RGB.
SourceImage = bytes | NDArray[np.uint8]


class ModelInput(NamedTuple):
    """Preprocessed image, ready to be one row of a batch."""

    # [3, H, W] RGB, padded to the bucket; float32 with the resize rule `torchvision`.
    pixels: Pixels
    bucket: ShapeBucket
    # Height and width in pixels before padding.
    size: tuple[int, int]
    # Height and width of the source image in pixels.
    source_size: tuple[int, int]


class PlannedImage(NamedTuple):
    """Source image with preprocessing parameters that were computed from the image's header."""

    # In a worker, an encoded image is a view of the memory that it shares with the server.
    source: SourceImage | memoryview
    header: ImageHeader
    bucket: ShapeBucket
    # Height and width in pixels after resizing.
    size: tuple[int, int]
    resize: ResizeRule = "pillow"

    @property
    def source_size(self) -> tuple[int, int]:
        """Height and width of the source image in pixels."""
        return self.header.size

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[Any, ...]]:
        """Pickle encoded images as out-of-band buffers, so that pickle does not copy the files."""
        source: Any = self.source
        if protocol >= _PROTOCOL_OF_BUFFERS and isinstance(source, bytes):
            source = PickleBuffer(source)
        return PlannedImage, (source, *self[1:])


def plan_image(
    source: SourceImage,
    preprocessing: Preprocessing,
    buckets: Sequence[ShapeBucket],
    *,
    max_pixels: int,
    apply_orientation: bool,
) -> PlannedImage:
    """Read an image's header, and choose the preprocessing parameters of the image.

    They are its size after resizing, and the smallest input size that holds the resized image.

    Args:
        source: Encoded image, or pixels [H, W, 3] RGB.
        preprocessing: Target sizes and resize rule.
        buckets: Input sizes of the model.
        max_pixels: Images with more pixels are rejected.
        apply_orientation: Apply the rotation in the image's EXIF data.

    Raises:
        ImageError: invalid image.
    """
    if isinstance(source, bytes):
        header = read_header(source, max_pixels=max_pixels, apply_orientation=apply_orientation)
    else:
        height, width = source.shape[:2]
        check_size(height, width, max_pixels)
        header = ImageHeader((height, width), orientation=1, is_plain_jpeg=False)
    rule = preprocessing.resize
    size = resized_size(*header.size, preprocessing.min_size, preprocessing.max_size, rule)
    return PlannedImage(source, header, smallest_bucket(*size, buckets), size, rule)


def resized_pixels(image: PlannedImage) -> Pixels:
    """Decode and resize a planned image.

    Returns:
        [h, w, 3] RGB: float32 if the resize rule is `torchvision`, else uint8.

    Raises:
        ImageError: the image is damaged.
    """
    pixels = image.source
    if isinstance(pixels, (bytes, memoryview)):
        height, width = image.source_size
        is_turned = image.header.orientation != 1
        pixels = decode_image(bytes(pixels), max_pixels=height * width, apply_orientation=is_turned)
    return resize_image(pixels, *image.size, image.resize)


def write_pixels(image: PlannedImage, row: Pixels) -> None:
    """Decode and resize a planned image, and write it to the top left corner of `row`.

    `row` is one image of a batch: [3, H, W], where H and W are the model's input size. It must be
    black. Its dtype is float32 if the resize rule is `torchvision`, else uint8.

    Raises:
        ImageError: the image is damaged; the row stays black.
    """
    height, width = image.size
    row[:, :height, :width] = resized_pixels(image).transpose(2, 0, 1)


def prepare_image(
    source: SourceImage,
    preprocessing: Preprocessing,
    buckets: Sequence[ShapeBucket],
    max_pixels: int,
) -> ModelInput:
    """Decode, rotate (EXIF) and resize an image. Pad it to the smallest bucket that holds it.

    Raises:
        ImageError: invalid image.
    """
    image = plan_image(
        source, preprocessing, buckets, max_pixels=max_pixels, apply_orientation=True
    )
    pixels = np.zeros((3, *image.bucket), pixel_dtype(preprocessing.resize))
    write_pixels(image, pixels)
    return ModelInput(pixels, image.bucket, image.size, image.source_size)

"""Images that leave the reading processes as JPEG bytes, to be decoded where the model is."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.device_images import decode_jpegs, resize_pixels, tensor_from_bytes
from ...model.images import ImageError, read_header
from .coco import DataError, ImageRecord


class EncodedImage(NamedTuple):
    """A JPEG file, and what is to be done with its pixels."""

    name: str
    """Path, for messages."""
    data: Tensor
    """[bytes] uint8."""
    size: tuple[int, int]
    """Height and width to resize to."""
    flip: bool
    """Mirror left and right."""


def encoded_image(record: ImageRecord, size: tuple[int, int], *, flip: bool) -> EncodedImage | None:
    """An image for the device to decode; None where a file wants a closer look.

    That is what is no plain JPEG, or not of the annotated size.
    """
    try:
        data = record.path.read_bytes()
        header = read_header(data, apply_orientation=False)
    except (OSError, ImageError):  # `read_image`, which comes next, says what is wrong
        return None
    if not header.is_plain_jpeg or header.size != (record.height, record.width):
        return None
    return EncodedImage(str(record.path), tensor_from_bytes(data), size, flip)


def decode_images(images: Sequence[EncodedImage], device: torch.device) -> list[Tensor]:
    """Pixels [3, h, w] uint8 RGB of each on a device, resized and mirrored there.

    Raises:
        DataError: a file is damaged within.
    """
    decoded = zip(images, _decoded(images, device), strict=True)
    resized = ((image, resize_pixels(pixels, image.size)) for image, pixels in decoded)
    return [pixels.flip(2) if image.flip else pixels for image, pixels in resized]


def _decoded(images: Sequence[EncodedImage], device: torch.device) -> Iterator[Tensor]:
    """[3, h, w] uint8 each, as stored."""
    outcomes = decode_jpegs([image.data for image in images], device)
    for image, pixels in zip(images, outcomes, strict=True):
        if isinstance(pixels, ImageError):
            raise DataError(
                f"{image.name} cannot be decoded ({pixels}); data.decode=workers leaves such files "
                "out"
            )
        yield pixels

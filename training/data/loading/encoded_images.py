"""Decode, resize and flip JPEG files on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....model.bundle.spec import ResizeRule
from ....model.device_images import decode_jpegs, resize_pixels, tensor_from_bytes
from ....model.image_decoding import read_header
from ....model.image_limits import ImageError
from ..coco.dataset import DataError, ImageRecord


class EncodedImage(NamedTuple):
    """Content of a JPEG file, with the size and flip to apply after decoding."""

    # Path, for messages.
    name: str
    # [n] uint8: the n bytes of the file.
    data: Tensor
    # Height and width after resizing.
    size: tuple[int, int]
    # Whether to flip horizontally.
    flip: bool
    resize: ResizeRule


def encoded_image(
    record: ImageRecord, size: tuple[int, int], resize: ResizeRule, *, flip: bool
) -> EncodedImage | None:
    """Read an image file for later decoding, resizing and flipping on the device.

    Args:
        record: Record with the path and the annotated size of the image.
        size: Height and width after resizing.
        resize: Rule for resizing.
        flip: Whether to flip the image horizontally.

    Returns:
        The content of the file with `size`, `resize` and `flip`. None: the device cannot decode the
            file, because it is unreadable or damaged, is not a grey or YCbCr JPEG, has an EXIF
            rotation, or does not have the annotated size.
    """
    try:
        data = record.path.read_bytes()
        header = read_header(data)
    except (OSError, ImageError):
        # The caller then calls `read_image`, which raises an error with the reason.
        return None
    fits = header.orientation == 1 and header.size == (record.height, record.width)
    if not header.is_plain_jpeg or not fits:
        return None
    return EncodedImage(str(record.path), tensor_from_bytes(data), size, flip, resize)


def decode_images(images: Sequence[EncodedImage], device: torch.device) -> list[Tensor]:
    """Decode, resize and flip images on a device. Return the pixels [3, h, w] RGB of each image.

    Raises:
        DataError: A file is damaged.
    """
    results = []
    decoded = decode_jpegs([image.data for image in images], device)
    for image, pixels in zip(images, decoded, strict=True):
        if isinstance(pixels, ImageError):
            raise DataError(
                f"{image.name} cannot be decoded ({pixels}); only the data-loading processes can "
                "skip such files, so set data.decode=workers to skip them"
            )
        resized = resize_pixels(pixels, image.size, image.resize)
        results.append(resized.flip(2) if image.flip else resized)
    return results

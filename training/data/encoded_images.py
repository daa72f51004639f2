"""Images that leave the reading processes as JPEG bytes, to be decoded where the model is."""

from collections.abc import Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torch.nn import functional as F
from torchvision.io import ImageReadMode, decode_jpeg

from .coco import DataError, ImageRecord

_START_OF_IMAGE, _END_OF_IMAGE = b"\xff\xd8\xff", b"\xff\xd9"


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

    That is what is no JPEG in grey or colour, is not of the annotated size, or is cut off.
    """
    try:
        data = record.path.read_bytes()
        image = JpegImageFile(BytesIO(data))
    except Exception:  # `read_image`, which comes next, says what is wrong
        return None
    whole = data.startswith(_START_OF_IMAGE) and _END_OF_IMAGE in data[-1024:]
    plain = image.mode in ("L", "RGB") and image.size == (record.width, record.height)
    if not (whole and plain):
        return None
    # A copy, because torch wants memory that it may write to.
    bytes_ = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return EncodedImage(str(record.path), bytes_, size, flip)


def decode_images(images: Sequence[EncodedImage], device: torch.device) -> list[Tensor]:
    """Pixels [3, h, w] uint8 RGB of each on a device, resized and mirrored there.

    Raises:
        DataError: a file is damaged within.
    """
    pixels = (
        _resized(raw, i.size) for raw, i in zip(_decoded(images, device), images, strict=True)
    )
    return [p.flip(2) if i.flip else p for p, i in zip(pixels, images, strict=True)]


def _decoded(images: Sequence[EncodedImage], device: torch.device) -> list[Tensor]:
    """[3, h, w] uint8 each, as stored."""
    if not images:
        return []
    try:
        decoded: list[Tensor] = decode_jpeg([i.data for i in images], ImageReadMode.RGB, device)
    except RuntimeError as error:
        if len(images) > 1:  # one after the other, to find out which
            return [pixels for image in images for pixels in _decoded([image], device)]
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{images[0].name} cannot be decoded ({reason}); data.decode=workers leaves such files "
            "out"
        ) from None
    return decoded


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """[3, h, w] bilinear and antialiased, to within a level of Pillow's."""
    if image.shape[1:] == size:
        return image
    resized = F.interpolate(image[None].float(), size, mode="bilinear", antialias=True)[0]
    return resized.round().clamp(0, 255).to(torch.uint8)

"""Which image files a device decodes, and what the host does where it cannot."""

import functools
import logging
import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ...model.device_images import turn_upright
from ...model.images import ImageError
from .preprocessing import PlannedImage, resized_pixels

_log = logging.getLogger(__name__)

_MAX_DEVICE_PIXELS: Final = 1 << 24
"""Larger images are decoded by the CPU, since a batch of them would take gigabytes of a GPU."""


def file_for_device(image: PlannedImage) -> bytes | None:
    """The file, if the device can decode it."""
    suits = image.header.is_plain_jpeg and math.prod(image.source_size) <= _MAX_DEVICE_PIXELS
    return image.source if suits and isinstance(image.source, bytes) else None


def pixels_from_host(image: PlannedImage) -> Tensor | ImageError:
    """[3, h, w] uint8 on the host."""
    try:
        pixels = resized_pixels(image)
    except ImageError as error:
        return error
    # What is not resized may lie in memory that torch must not write to.
    return torch.from_numpy(np.require(pixels, requirements="W")).permute(2, 0, 1)


def upright_pixels(image: PlannedImage, decoded: Tensor | ImageError) -> Tensor | ImageError:
    """[3, h, w] uint8 of what the device decoded; what it could not, the host may."""
    if isinstance(decoded, ImageError):
        _warn_once(str(decoded))
        return pixels_from_host(image)
    return turn_upright(decoded, image.header.orientation)


@functools.lru_cache(maxsize=16)
def _warn_once(fault: str) -> None:
    """Tell a fault of the device when it is first met; it may concern all images."""
    _log.warning("an image is decoded on the host, for on the device it is not: %s", fault)

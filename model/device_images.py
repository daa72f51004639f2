"""JPEG decoding and resizing on the model's device.

On a CPU, and on the JPEG decoder hardware of a GPU, decoded pixels equal Pillow's. If a GPU lacks
this hardware, or the hardware does not support a JPEG (for example a progressive JPEG), torchvision
decodes the JPEG. It uses nvJPEG's RGB output, which repeats subsampled chroma values, whereas
Pillow interpolates them. The tests allow these absolute differences between torchvision's pixel
values (0..255) and Pillow's:

    chroma resolution   mean    maximum
    full                1.5     16
    half                5       48

With the resize rules `pillow` and `detectron2`, resized values equal Pillow's. With the rule
`torchvision`, they equal torchvision's.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.io import ImageReadMode, decode_jpeg

from ..plugins.resize_pad import resize_pad
from .bundle.spec import ResizeRule
from .hardware_jpegs import NVJPEG_LOCK, allocation_stream, hardware_jpeg_decoder
from .image_limits import ImageError

# Once per process, torch warns that writes to a tensor in read-only memory are undefined. Trigger
# this warning here, where it is suppressed.
with warnings.catch_warnings(action="ignore"):
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))

# EXIF orientations of images that must be transposed, and of images whose rows or columns must be
# reversed after that.
_TRANSPOSED = frozenset({5, 6, 7, 8})
_MIRRORED_ROWS = frozenset({3, 4, 7, 8})
_MIRRORED_COLUMNS = frozenset({2, 3, 6, 7})


def tensor_from_bytes(data: bytes | memoryview) -> Tensor:
    """Return a view of bytes as a tensor [N] uint8. Do not write to it."""
    return torch.from_numpy(np.frombuffer(data, np.uint8))


def decode_jpegs(files: Sequence[Tensor], device: torch.device) -> list[Tensor | ImageError]:
    """Decode JPEGs that are complete and grey or YCbCr (`ImageHeader.is_plain_jpeg`).

    Args:
        files: contents as [N] uint8 tensors on the CPU.
        device: device that decodes.

    Returns:
        Per file, pixels [3, h, w] uint8 RGB without EXIF rotation, or the error of a damaged file.
        On a GPU, the pixels are valid once the current stream has run the queued work.
    """
    hardware = hardware_jpeg_decoder(device) if device.type == "cuda" else None
    decoded = hardware.decode(files) if hardware else [None] * len(files)
    others = [file for file, own in zip(files, decoded, strict=True) if own is None]
    remaining = iter(_decode_with_torchvision(others, device))
    return [next(remaining) if own is None else own for own in decoded]


def _decode_with_torchvision(
    files: Sequence[Tensor], device: torch.device
) -> list[Tensor | ImageError]:
    """Decode grey or YCbCr JPEGs with torchvision.

    Returns:
        Per file, pixels [3, h, w] uint8 RGB, or the error of a damaged file.
    """
    if not files:
        return []
    decode = _decode_on_gpu if device.type == "cuda" else decode_jpeg
    try:
        return list(decode(list(files), ImageReadMode.RGB, device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if len(files) > 1:  # decode one by one to find the damaged file
            return [own for file in files for own in _decode_with_torchvision([file], device)]
        return [ImageError(f"the image is damaged: {str(error).splitlines()[0]}")]


def _decode_on_gpu(
    files: list[Tensor], mode: ImageReadMode, device: torch.device
) -> Sequence[Tensor]:
    """Decode JPEGs by `torchvision.io.decode_jpeg`, into memory that no queued GPU work uses."""
    current = torch.cuda.current_stream(device)
    allocating = allocation_stream(current.device)
    with NVJPEG_LOCK, torch.cuda.stream(allocating):
        try:
            images = decode_jpeg(files, mode, device)
        except RuntimeError:
            # The GPU may still decode the files before the damaged one, into memory that is free
            # now. No stream of ours waits for that, so wait for the whole device.
            torch.cuda.synchronize(device)
            raise
    current.wait_stream(allocating)
    for image in images:
        image.record_stream(current)
    return images  # type: ignore[no-any-return]


def apply_orientation(image: Tensor, orientation: int) -> Tensor:
    """Rotate or mirror an image [3, h, w] by its EXIF orientation, from 1 (unchanged) to 8."""
    if orientation in _TRANSPOSED:
        image = image.mT
    mirrored = [1] * (orientation in _MIRRORED_ROWS) + [2] * (orientation in _MIRRORED_COLUMNS)
    return image.flip(mirrored) if mirrored else image


def resize_pixels(image: Tensor, size: tuple[int, int], rule: ResizeRule = "pillow") -> Tensor:
    """Resize an image [3, h, w] uint8 to [3, height, width], where `size` is (height, width).

    The result is float32 if `rule` is "torchvision", else uint8.
    """
    if rule == "torchvision":
        if image.shape[1:] == size:
            return image.float()
        return F.interpolate(image[None].float(), size, mode="bilinear", align_corners=False)[0]
    if image.shape[1:] == size:
        return image
    return resize_pad([image], size, *size)[0]

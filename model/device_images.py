"""From JPEG files to pixels of the size that the model wants, where the model is.

On a GPU nvJPEG decodes. It gives what Pillow gives but for rounding, by 1.5 of 255 levels in the
mean and 16 at most, and for colours that were stored at half the resolution, which it enlarges more
coarsely: by 5 in the mean and 48 at most. Resizing is as Pillow's to within a level.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from ..plugins.resize_pad import resize_pad
from .images import ImageError

_TRANSPOSED = frozenset({5, 6, 7, 8})
_MIRRORED_ROWS = frozenset({3, 4, 7, 8})
_MIRRORED_COLUMNS = frozenset({2, 3, 6, 7})


def tensor_from_bytes(data: bytes) -> Tensor:
    """A copy [bytes] uint8, because torch wants memory that it may write to."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def decode_jpegs(files: Sequence[Tensor], device: torch.device) -> list[Tensor | ImageError]:
    """Decode JPEGs that `model.images.read_header` calls plain; waits for the current stream.

    Args:
        files: [bytes] uint8 each, on the host.
        device: Where to decode.

    Returns:
        Of each file its pixels [3, h, w] uint8 RGB as stored, or what is wrong with it.
    """
    if not files:
        return []
    if device.type == "cuda":
        # The decoder has a stream of its own, and may be given memory that was let go of in the
        # current stream, but is not done with there.
        torch.cuda.current_stream(device).synchronize()
    try:
        return list(decode_jpeg(list(files), ImageReadMode.RGB, device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if len(files) > 1:  # one after the other, to find out which
            return [outcome for file in files for outcome in decode_jpegs([file], device)]
        return [ImageError(f"the image is damaged: {str(error).splitlines()[0]}")]


def turn_upright(image: Tensor, orientation: int) -> Tensor:
    """A view of [3, h, w], turned as EXIF's orientation asks for: 1 to 8, 1 leaves it."""
    if orientation in _TRANSPOSED:
        image = image.mT
    mirrored = [1] * (orientation in _MIRRORED_ROWS) + [2] * (orientation in _MIRRORED_COLUMNS)
    return image.flip(mirrored) if mirrored else image


def resize_pixels(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize [3, h, w] uint8, bilinear and antialiased, to within a level of Pillow's."""
    if image.shape[1:] == size:
        return image
    resized: Tensor = resize_pad([image], size, *size)[0]
    return resized

"""What is detected in while speed is measured."""

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..model.images import decode_image, resize_image
from ..model.spec import ShapeBucket

_CELL = 16


def noise_jpeg(size: ShapeBucket) -> bytes:
    """A JPEG of coloured squares, always the same."""
    cells = (-(-size.height // _CELL), -(-size.width // _CELL), 3)
    colours = np.random.default_rng(0).integers(0, 256, cells, np.uint8)
    squares = colours.repeat(_CELL, axis=0).repeat(_CELL, axis=1)
    file = BytesIO()
    Image.fromarray(squares[: size.height, : size.width]).save(file, "JPEG", quality=90)
    return file.getvalue()


def batch_from_encoded(
    images: Sequence[bytes], bucket: ShapeBucket, count: int
) -> NDArray[np.uint8]:
    """Model input [count, 3, H, W]: the images in turn, each stretched over the whole bucket.

    Raises:
        ImageError: one of them is no image.
    """
    decoded = [resize_image(decode_image(data), *bucket) for data in images[:count]]
    batch = np.stack([decoded[i % len(decoded)] for i in range(count)])
    return np.ascontiguousarray(batch.transpose(0, 3, 1, 2))

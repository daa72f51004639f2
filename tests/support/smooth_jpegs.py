"""JPEGs of smooth images."""

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def pixels(height: int = 48, width: int = 64, seed: int = 0) -> NDArray[np.uint8]:
    """Return a smooth image [height, width, 3].

    All JPEG decoders upsample its chroma to almost the same values.
    """
    tiles = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return np.array(Image.fromarray(tiles).resize((width, height), Image.Resampling.BICUBIC))


def jpeg(image: NDArray[np.uint8], mode: str = "RGB", **options: object) -> bytes:
    file = BytesIO()
    Image.fromarray(image).convert(mode).save(file, "JPEG", quality=95, **options)
    return file.getvalue()

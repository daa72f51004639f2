"""Conversion of decoded Pillow images to RGB arrays with EXIF rotation, one strip at a time."""

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image, Transpose, fromarray

# Transposition that turns an image upright, by the image's EXIF orientation.
TRANSPOSES = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
# Orientations whose first stored rows are the last rows, or columns, of the upright image.
_REVERSED = (3, 4, 6, 7)
# Number of pixels that are converted at a time. Converting the whole image at once would take more
# memory and time.
_STRIP_PIXELS = 1 << 18


def upright_rgb(image: Image, orientation: int, excess_bits: int) -> NDArray[np.uint8]:
    """Return the pixels of a loaded image after its EXIF rotation, [H, W, 3] RGB uint8.

    Args:
        image: Loaded image in any of Pillow's modes.
        orientation: EXIF orientation to apply, 1 to 8.
        excess_bits: Number of low bits to drop from 16-bit pixels.
    """
    width, height = image.size
    upright = np.empty((width, height, 3) if orientation > 4 else (height, width, 3), np.uint8)
    transpose = TRANSPOSES.get(orientation)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        strip = image.crop((0, top, width, bottom))
        upright_strip = strip if transpose is None else strip.transpose(transpose)
        pixels = _rgb_from_strip(upright_strip, excess_bits)
        first = height - bottom if orientation in _REVERSED else top
        along = slice(first, first + bottom - top)
        if orientation > 4:
            upright[:, along] = pixels
        else:
            upright[along] = pixels
    return upright


def _rgb_from_strip(strip: Image, excess_bits: int) -> NDArray[np.uint8]:
    if strip.mode.startswith("I;16"):
        strip = fromarray((np.asarray(strip) >> excess_bits).astype(np.uint8))
    elif strip.mode == "P":  # via RGBA, because palettes may hold transparency
        strip = strip.convert("RGBA")
    return np.asarray(strip if strip.mode == "RGB" else strip.convert("RGB"))

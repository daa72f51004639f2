"""From encoded bytes to padded model input. Needs no torch.

Arrays are [H, W, 3] RGB uint8 until `pad_to_bucket` turns them into [3, H, W]. Training, serving
and prediction all prepare images here, so that they see the same pixels.
"""

import math
import re
from collections.abc import Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags
from PIL.Image import Resampling, Transpose, fromarray
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import MARKER, JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from .spec import MAX_PIXELS, ShapeBucket

MIN_SIDE = 8
"""Pixels that an image must have on each side."""

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
"""Endings, in lower case, of the files in a folder that are taken for images."""


_START_OF_JPEG = b"\xff\xd8\xff"
_END_OF_JPEG = b"\xff\xd9"
_START_OF_SCAN = b"\xff\xda"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_MAX_SCANS = 100
"""Of a JPEG, each of which is a pass over all its pixels; progressive ones have about ten."""
_MAX_SEGMENTS = 2000
"""Before the first scan of a JPEG; a large profile or description takes some hundred."""
_MAX_JUNK = 4096
"""Bytes between the segments."""
_MAX_CHUNKS = 100_000
"""Of a PNG, for which the largest image needs no more, with the usual 8 KiB in each."""
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
"""What makes an image of an EXIF orientation upright."""
_PNG_METADATA = (b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type exif")


class ImageError(ValueError):
    """An image that cannot be used; the message is one sentence that says why."""


class ImageHeader(NamedTuple):
    """What can be told of an image before it is decoded."""

    size: tuple[int, int]
    """Height and width in pixels that `decode_image` will give it."""
    orientation: int
    """EXIF's, 1 to 8, by which it is to be turned; 1 is as stored."""
    is_plain_jpeg: bool
    """A JPEG that seems whole, grey or of the usual colours, which all decoders read alike."""


def is_jpeg(data: bytes) -> bool:
    """Whether an encoded image is a JPEG, if it is one at all."""
    return data.startswith(_START_OF_JPEG)


def read_header(
    data: bytes, *, max_pixels: int = MAX_PIXELS, apply_orientation: bool = True
) -> ImageHeader:
    """Look at an image without decoding it; arguments and errors are those of `decode_image`."""
    image = _opened(data, max_pixels)
    orientation = _orientation_of(image, data) if apply_orientation else 1
    width, height = image.size
    size = (width, height) if orientation > 4 else (height, width)
    return ImageHeader(size, orientation, _is_plain_jpeg(image, data))


def decode_image(
    data: bytes, *, max_pixels: int = MAX_PIXELS, apply_orientation: bool = True
) -> NDArray[np.uint8]:
    """Decode a JPEG, PNG or WebP image.

    Grey, palette and CMYK images become RGB, 16-bit ones keep their high bytes, transparency is
    dropped, and of an animation the first picture is taken. Time and memory are bounded by the
    number of pixels and bytes, whatever the data says.

    Args:
        data: The encoded image.
        max_pixels: Larger images are refused after a look at their header alone.
        apply_orientation: Turn the image upright as its EXIF says. COCO annotations refer to the
            stored pixels: leave it off to read them.

    Returns:
        [H, W, 3] RGB.

    Raises:
        ImageError: no image of these formats, a damaged one, or one of unusable size.
    """
    image = _opened(data, max_pixels)
    orientation = _orientation_of(image, data) if apply_orientation else 1
    try:
        return _rgb_from_image(image, orientation)
    except Exception as error:
        raise ImageError(f"the image is truncated or damaged: {error}") from error


def resized_size(height: int, width: int, min_size: int, max_size: int) -> tuple[int, int]:
    """Height and width in pixels after resizing, by torchvision's rule.

    The shorter side becomes `min_size` unless the longer one would then exceed `max_size`.
    """
    scale = min(min_size / min(height, width), max_size / max(height, width))
    return max(1, math.floor(height * scale)), max(1, math.floor(width * scale))


def smallest_bucket(height: int, width: int, buckets: Sequence[ShapeBucket]) -> ShapeBucket:
    """The bucket of least area that holds `height` x `width` pixels; the first of equals.

    Raises:
        ImageError: no bucket does.
    """
    fitting = [b for b in buckets if b.height >= height and b.width >= width]
    if not fitting:
        raise ImageError(
            f"resized to {height}x{width} pixels (height x width) it fits none of the input sizes "
            f"{', '.join(map(str, buckets))}"
        )
    return min(fitting, key=lambda b: b.height * b.width)


def resize_image(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize [H, W, 3] to [height, width, 3], bilinear and antialiased."""
    if image.shape[:2] == (height, width):
        return image
    return np.array(fromarray(image).resize((width, height), Resampling.BILINEAR))


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Refuse an image of unusable size.

    Raises:
        ImageError: it has more than `max_pixels` pixels, or a side is shorter than `MIN_SIDE`.
    """
    size = f"the image is {height}x{width} pixels (height x width)"
    if height * width > max_pixels:
        raise ImageError(f"{size}, more than the {max_pixels} pixels allowed")
    if min(height, width) < MIN_SIDE:
        raise ImageError(f"{size}; each side must have at least {MIN_SIDE}")


def pad_to_bucket(image: NDArray[np.uint8], bucket: ShapeBucket) -> NDArray[np.uint8]:
    """Place [H, W, 3] in the top left of a black [3, bucket.height, bucket.width], contiguous."""
    height, width = image.shape[:2]
    padded = np.zeros((3, *bucket), np.uint8)
    padded[:, :height, :width] = image.transpose(2, 0, 1)
    return padded


def _opened(data: bytes, max_pixels: int) -> ImageFile:
    """The image, of which only the header was read, if its size can be used."""
    # The plugins are called rather than PIL.Image.open, whose own limit on pixels is a global.
    plugin = _plugin_for(data)
    if plugin is JpegImageFile:
        _check_jpeg(data)
    elif plugin is PngImageFile:
        _check_png(data)
    try:
        image = plugin(BytesIO(data))
    except Exception as error:  # codecs answer hostile bytes with anything but one exception type
        raise ImageError(f"the image's header is damaged: {error}") from error
    image.decodermaxblock = len(data)  # else what a codec cannot use yet is copied for each block
    check_size(image.height, image.width, max_pixels)
    return image


def _orientation_of(image: ImageFile, data: bytes) -> int:
    # Pillow decodes a whole PNG in search of metadata behind its pixels, and most have none.
    if isinstance(image, PngImageFile) and not any(name in data for name in _PNG_METADATA):
        return 1
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:
        raise ImageError(f"the image is truncated or damaged: {error}") from error
    return int(orientation) if orientation in range(1, 9) else 1


def _is_plain_jpeg(image: ImageFile, data: bytes) -> bool:
    if not isinstance(image, JpegImageFile) or _END_OF_JPEG not in data[-1024:]:
        return False
    stores_rgb = image.info.get("adobe_transform") == 0 or [c[0] for c in image.layer] == [*b"RGB"]
    return image.mode == "L" or (image.mode == "RGB" and not stores_rgb)


def _plugin_for(data: bytes) -> type[ImageFile]:
    if is_jpeg(data):
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImageFile
    raise ImageError("the data is no JPEG, PNG or WebP image" if data else "the image is empty")


def _check_jpeg(data: bytes) -> None:
    """Refuse a JPEG that takes far longer to read than others of its size.

    Pillow goes through the header in Python, byte by byte where it finds none of the segments.
    """
    scans = _occurrences(_START_OF_SCAN, data)
    if scans > _MAX_SCANS:
        raise ImageError(f"the image has {scans} scans, more than the {_MAX_SCANS} allowed")
    position, junk = 2, 0
    for _ in range(_MAX_SEGMENTS):
        match = _JPEG_MARKER.search(data, position)
        start = match.start() if match else len(data)
        junk += start - position
        if junk > _MAX_JUNK:
            raise ImageError(f"the image's header has more than {_MAX_JUNK} bytes of no meaning")
        marker = data[start : start + 2]
        if match is None or marker == _START_OF_SCAN:
            return
        position = start + 2
        *_, segment = MARKER.get(int.from_bytes(marker), (None,))
        if segment is not None:  # which begins with its length
            position += max(2, int.from_bytes(data[position : position + 2]))
    raise ImageError(f"the image's header has more than {_MAX_SEGMENTS} segments")


def _occurrences(pair: bytes, data: bytes) -> int:
    """How often two bytes follow each other; a fifth of the time that `bytes.count` takes."""
    (number,) = np.frombuffer(pair, np.uint16)
    pairs = (np.frombuffer(data, np.uint16, (len(data) - odd) // 2, odd) for odd in (0, 1))
    return sum(int(np.count_nonzero(half == number)) for half in pairs)


def _check_png(data: bytes) -> None:
    """Refuse a PNG of more chunks than any needs; Pillow reads each in Python."""
    position = 8
    for _ in range(_MAX_CHUNKS):
        if position >= len(data):
            return
        position += 12 + int.from_bytes(data[position : position + 4])
    raise ImageError(f"the image has more than {_MAX_CHUNKS} chunks")


def _rgb_from_image(image: ImageFile, orientation: int) -> NDArray[np.uint8]:
    image.load()
    upright = image.transpose(_TURNS[orientation]) if orientation in _TURNS else image
    if upright.mode.startswith("I;16"):
        upright = fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    elif upright.mode == "P":  # by way of RGBA, since palettes with transparency need it
        upright = upright.convert("RGBA")
    return np.array(upright if upright.mode == "RGB" else upright.convert("RGB"))

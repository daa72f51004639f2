"""Image decoding on the CPU.

Training, serving and prediction share these functions, so that they see the same pixels. Arrays are
[H, W, 3] RGB uint8. This module does not import torch.
"""

from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags
from PIL.Image import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from .bundle.spec import MAX_PIXELS
from .image_limits import (
    END_OF_JPEG,
    ImageError,
    check_jpeg,
    check_png,
    check_size,
    ends_with_scan,
    find_first_scan,
)
from .jpeg_headers import size_of_usual_jpeg
from .upright_images import upright_rgb

# Lower-case suffixes by which images in a folder are recognised.
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

_START_OF_JPEG = b"\xff\xd8\xff"
# Memory in bytes per pixel of an image: after Pillow has loaded it; at the peak of decoding and
# resizing; and at this peak for a WebP image, because libwebp holds several copies.
_PILLOW_BYTES, _BYTES_PER_PIXEL, _WEBP_BYTES_PER_PIXEL = 4, 8, 18
# Bit depths of cameras' sensors. Values in a 16-bit file may use only the lowest 10 bits, for
# example. If only the highest 8 of the 16 bits were kept, such an image would turn dark.
_DEPTHS = (8, 10, 12, 14, 16)
_PNG_METADATA = (b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type exif")


class ImageHeader(NamedTuple):
    """Properties of an encoded image, read without decoding it."""

    # Height and width in pixels of the result of `decode_image`.
    size: tuple[int, int]
    # EXIF orientation to apply, 1 to 8; 1 means no change.
    orientation: int
    # True: a complete JPEG, grey or YCbCr, which CPU and GPU decode to similar pixels.
    is_plain_jpeg: bool


def is_jpeg(data: bytes) -> bool:
    """Whether `data` begins with the JPEG signature."""
    return data.startswith(_START_OF_JPEG)


def read_header(
    data: bytes, *, max_pixels: int = MAX_PIXELS, apply_orientation: bool = True
) -> ImageHeader:
    """Return the properties of an encoded image from its header, without decoding the pixels.

    Args:
        data: the encoded image.
        max_pixels: images with more pixels are rejected.
        apply_orientation: True: return the EXIF orientation, and the size after the rotation.
            False: return orientation 1, and the stored size.

    Raises:
        ImageError: the data are not a JPEG, PNG or WebP image, the header is damaged, or the image
            is too small, has more than `max_pixels` pixels, is truncated, or would take too long to
            decode. Some damaged headers are reported only by `decode_image`.
    """
    if size := size_of_usual_jpeg(data):
        check_size(*size, max_pixels)
        return ImageHeader(size, 1, END_OF_JPEG in data[-1024:])
    image = _opened(data, max_pixels)
    orientation = _orientation_of(image, data) if apply_orientation else 1
    width, height = image.size
    size = (width, height) if orientation > 4 else (height, width)
    return ImageHeader(size, orientation, _is_plain_jpeg(image, data))


def decode_image(
    data: bytes, *, max_pixels: int = MAX_PIXELS, apply_orientation: bool = True
) -> NDArray[np.uint8]:
    """Decode a JPEG, PNG or WebP image.

    Grey, palette and CMYK images are converted to RGB, transparency is dropped, and an animation
    yields its first frame. Time and memory are bounded by the number of pixels and bytes, even for
    hostile data.

    The values of a 16-bit grey image may use only the lowest bits, for example the lowest 12. The
    image's depth is the smallest of 8, 10, 12, 14 and 16 bits in which its largest value fits. The
    highest 8 bits of this depth are kept.

    Args:
        data: the encoded image.
        max_pixels: images with more pixels are rejected before decoding.
        apply_orientation: apply the EXIF orientation. Use False if annotations refer to the stored
            pixels, as those of the COCO data sets do.

    Returns:
        [H, W, 3] RGB uint8.

    Raises:
        ImageError: the data are not a JPEG, PNG or WebP image, or the image is damaged, is too
            small, has more than `max_pixels` pixels, or would take too long to decode. Or the image
            has 16 bits per colour channel, and all its values fit in 14 bits. It would turn dark,
            because the highest 8 of the 16 bits are kept.
    """
    image = _opened(data, max_pixels)
    orientation = _orientation_of(image, data) if apply_orientation else 1
    try:
        # Read `tile` before `load`, which empties this attribute.
        is_deep = isinstance(image, PngImageFile) and "16B" in str(image.tile)
        image.load()
        return upright_rgb(image, orientation, excess_bits(image) if is_deep else 0)
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"the image is truncated or damaged: {error}") from error


def decoding_memory(data: bytes, *, max_pixels: int = MAX_PIXELS) -> int:
    """Estimate the peak memory in bytes of decoding and resizing an image. Read only the header.

    Raises:
        ImageError: the data are not a JPEG, PNG or WebP image, the header is damaged, or the image
            is too small, has more than `max_pixels` pixels, is truncated, or would take too long to
            decode.
    """
    image = _opened(data, max_pixels)
    per_pixel: float = _BYTES_PER_PIXEL
    if isinstance(image, WebPImageFile):
        per_pixel = _WEBP_BYTES_PER_PIXEL
    elif isinstance(image, JpegImageFile) and not ends_with_scan(
        image, data, find_first_scan(data)
    ):
        # libjpeg keeps all coefficients of a JPEG with several scans, two bytes each, until the
        # last scan.
        areas = [across * down for _, across, down, _ in image.layer]
        per_pixel = max(per_pixel, _PILLOW_BYTES + 2 * sum(areas) / max(areas))
    return round(per_pixel * image.width * image.height)


def plugin_for(data: bytes) -> type[ImageFile] | None:
    """Return Pillow's reader class for JPEG, PNG or WebP data, and None for other data."""
    if is_jpeg(data):
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImageFile
    return None


def _opened(data: bytes, max_pixels: int) -> ImageFile:
    """Open an encoded image. Check its header and size, but do not decode its pixels yet."""
    # PIL.Image.open has a global limit of pixels, so the format's plugin is called directly.
    plugin = plugin_for(data)
    if plugin is None:
        reason = "the data is not a JPEG, PNG or WebP image" if data else "the image is empty"
        raise ImageError(reason)
    scan = find_first_scan(data) if plugin is JpegImageFile else 0
    if plugin is PngImageFile:
        check_png(data)
    try:
        image = plugin(BytesIO(data))
    except Exception as error:  # on hostile bytes, codecs raise exceptions of any type
        raise ImageError(f"the image's header is damaged: {error}") from error
    # Let Pillow decode the data as one block. Otherwise it would copy the remaining data after each
    # block.
    image.decodermaxblock = len(data)
    check_size(image.height, image.width, max_pixels)
    if scan:
        check_jpeg(image, data, scan)
    return image


def _orientation_of(image: ImageFile, data: bytes) -> int:
    # To find metadata after the pixels of a PNG, Pillow decodes the whole image. Most PNGs have no
    # metadata, so search the data for the names of metadata first.
    if isinstance(image, PngImageFile) and not any(name in data for name in _PNG_METADATA):
        return 1
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:
        raise ImageError(f"the image is truncated or damaged: {error}") from error
    return int(orientation) if orientation in range(1, 9) else 1


def _is_plain_jpeg(image: ImageFile, data: bytes) -> bool:
    if not isinstance(image, JpegImageFile) or END_OF_JPEG not in data[-1024:]:
        return False
    stores_rgb = image.info.get("adobe_transform") == 0 or [c[0] for c in image.layer] == [*b"RGB"]
    return image.mode == "L" or (image.mode == "RGB" and not stores_rgb)


def excess_bits(image: Image) -> int:
    """Return the number of low bits to drop to reduce a loaded 16-bit image to 8 bits.

    Return 0 if the values fit in 8 bits, or if Pillow has dropped the low bits already.

    Raises:
        ImageError: the highest bits of a colour image are 0, for example because it uses only the
            lowest 12 of 16 bits. Pillow keeps the highest 8 bits, so the image would be too dark.
    """
    extrema: Any = image.getextrema()
    is_grey = image.mode.startswith("I;16")
    maximum = extrema[1] if is_grey else max(high for _, high in extrema[:3]) << 8 | 0xFF
    depth = next(depth for depth in _DEPTHS if maximum < 1 << depth)
    if is_grey:
        return depth - 8
    if depth < _DEPTHS[-1]:
        raise ImageError(
            f"the image has 16 bits per channel but uses only the lowest {depth} bits, so its "
            "colours would turn dark; convert it to 8 bits per channel"
        )
    return 0

"""Image decoding on the CPU. Needs no torch.

Training, serving and prediction share these functions, so that they see the same pixels. Arrays are
[H, W, 3] RGB uint8.
"""

import re
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import MARKER, JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from .bundle.spec import MAX_PIXELS
from .jpeg_headers import MAX_PIXELS_PER_BYTE, size_of_usual_jpeg
from .rgb_strips import upright_rgb

# Minimum height and width of an image in pixels.
MIN_SIDE = 8

# Lower-case suffixes by which images in a folder are recognised.
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

_START_OF_JPEG = b"\xff\xd8\xff"
_END_OF_JPEG = b"\xff\xd9"
_START_OF_SCAN = b"\xff\xda"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
# Markers that end the data of a scan: neither restart markers nor reserved ones.
_MARKER_AFTER_SCAN = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]", re.DOTALL)
# Limits against files that are small but slow to decode.
# Maximum scans of a JPEG, and maximum pixels of all scans: each scan is a pass over all pixels.
# Progressive JPEGs have about ten scans.
_MAX_SCANS, _MAX_SCANNED_PIXELS = 100, 16 * MAX_PIXELS
# Markers of arithmetic coding, with which a block of 64 pixels can take less than one bit. The
# limit `MAX_PIXELS_PER_BYTE` does not apply to such files.
_ARITHMETIC_CODING = (b"\xff\xc9", b"\xff\xca")
# Maximum segments before the first scan of a JPEG, and from there to its end. A large colour
# profile or description takes hundreds.
_MAX_SEGMENTS = 2000
# Maximum bytes between the segments of a JPEG's header.
_MAX_JUNK = 4096
# Maximum chunks of a PNG; at the usual 8 KiB per chunk the largest allowed image has fewer.
_MAX_CHUNKS = 100_000
# Peak memory of decoding and resizing in bytes per pixel. Pillow stores four bytes per pixel.
# libwebp stores several such copies.
_PILLOW_BYTES, _BYTES_PER_PIXEL, _WEBP_BYTES_PER_PIXEL = 4, 8, 18
# Bit depths of sensors. The values of a 16-bit image may have fewer bits. Such an image would turn
# dark if its values were not scaled.
_DEPTHS = (8, 10, 12, 14, 16)
_PNG_METADATA = (b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type exif")


class ImageError(ValueError):
    """Invalid image; the message is one sentence with the reason."""


class ImageHeader(NamedTuple):
    """Properties of an encoded image, read without decoding it."""

    # Height and width in pixels of the result of `decode_image`.
    size: tuple[int, int]
    # EXIF orientation to apply, 1 to 8; 1 is as stored.
    orientation: int
    # True: a complete JPEG, grey or YCbCr, which CPU and GPU decode to similar pixels.
    is_plain_jpeg: bool


def is_jpeg(data: bytes) -> bool:
    """Whether `data` begins with the JPEG signature."""
    return data.startswith(_START_OF_JPEG)


def read_header(
    data: bytes, *, max_pixels: int = MAX_PIXELS, apply_orientation: bool = True
) -> ImageHeader:
    """Read the header of an encoded image, without decoding the pixels.

    Args:
        data: the encoded image.
        max_pixels: larger images are rejected.
        apply_orientation: return the size of the upright image. False: return the stored size, and
            orientation 1.

    Raises:
        ImageError: the data are not a JPEG, PNG or WebP image, the header is damaged, or the size
            is invalid. Some damaged headers are reported only by `decode_image`.
    """
    if size := size_of_usual_jpeg(data):
        check_size(*size, max_pixels)
        return ImageHeader(size, 1, _END_OF_JPEG in data[-1024:])
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
    yields its first frame. 16-bit grey images keep the highest 8 of the 8, 10, 12, 14 or 16 bits
    that their maximum needs. Time and memory are bounded by the number of pixels and bytes, even
    for hostile data.

    Args:
        data: the encoded image.
        max_pixels: larger images are rejected before decoding.
        apply_orientation: apply the EXIF orientation. Use False if annotations refer to the stored
            pixels, as those of the COCO data sets do.

    Returns:
        [H, W, 3] RGB uint8.

    Raises:
        ImageError: the data are not an image of these formats, or damaged, or the size is invalid,
            or a 16-bit colour image holds at most 14 bits.
    """
    image = _opened(data, max_pixels)
    orientation = _orientation_of(image, data) if apply_orientation else 1
    try:
        return _rgb_from_image(image, orientation)
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"the image is truncated or damaged: {error}") from error


def decoding_memory(data: bytes, *, max_pixels: int = MAX_PIXELS) -> int:
    """Estimate the peak memory in bytes of decoding and resizing an image from its header.

    Raises:
        ImageError: the data are not a JPEG, PNG or WebP image, the header is damaged, or the image
            is too small or has more than `max_pixels` pixels.
    """
    image = _opened(data, max_pixels)
    per_pixel: float = _BYTES_PER_PIXEL
    if isinstance(image, WebPImageFile):
        per_pixel = _WEBP_BYTES_PER_PIXEL
    elif isinstance(image, JpegImageFile) and not _ends_with_scan(image, data, _first_scan(data)):
        # Of a JPEG with several scans, libjpeg keeps all coefficients, of two bytes each, until the
        # last scan.
        areas = [across * down for _, across, down, _ in image.layer]
        per_pixel = max(per_pixel, _PILLOW_BYTES + 2 * sum(areas) / max(areas))
    return round(per_pixel * image.width * image.height)


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Check the size of an image.

    Raises:
        ImageError: the image has over `max_pixels` pixels, or a side is shorter than `MIN_SIDE`.
    """
    size = f"the image is {height}x{width} pixels (height x width)"
    if height * width > max_pixels:
        raise ImageError(f"{size}, more than the {max_pixels} pixels allowed")
    if min(height, width) < MIN_SIDE:
        raise ImageError(f"{size}; each side must have at least {MIN_SIDE}")


def plugin_for(data: bytes) -> type[ImageFile] | None:
    """Return Pillow's class for a JPEG, PNG or WebP image. None: the data has another signature."""
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
    first_scan = _first_scan(data) if plugin is JpegImageFile else 0
    if plugin is PngImageFile:
        _check_png(data)
    try:
        image = plugin(BytesIO(data))
    except Exception as error:  # on hostile bytes, codecs raise exceptions of any type
        raise ImageError(f"the image's header is damaged: {error}") from error
    # Let Pillow decode the data as one block. For each of several blocks, it would copy the unused
    # rest of the data.
    image.decodermaxblock = len(data)
    check_size(image.height, image.width, max_pixels)
    if first_scan:
        _check_jpeg(image, data, first_scan)
    return image


def _orientation_of(image: ImageFile, data: bytes) -> int:
    # To find metadata after the pixels of a PNG, Pillow decodes the whole image. Most PNGs have no
    # metadata, so search for its names first.
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


def _check_jpeg(image: ImageFile, data: bytes, first_scan: int) -> None:
    """Reject a JPEG that is much slower to decode than others of its size."""
    pixels = image.height * image.width
    is_huffman = not any(marker in data[:first_scan] for marker in _ARITHMETIC_CODING)
    if is_huffman and pixels > MAX_PIXELS_PER_BYTE * (len(data) - first_scan):
        raise ImageError(f"the image is truncated: {len(data)} bytes cannot hold {pixels} pixels")
    allowed = min(_MAX_SCANS, _MAX_SCANNED_PIXELS // pixels)
    if _ends_with_scan(image, data, first_scan):
        return
    # This count is fast but too high: it includes thumbnails, and videos behind the image's end.
    # Only if it exceeds the limit are the scans counted exactly.
    if _occurrences(_START_OF_SCAN, data) > allowed:
        _check_scans(data, first_scan, allowed)


def _ends_with_scan(image: ImageFile, data: bytes, first_scan: int) -> bool:
    """Whether decoders stop after the first scan, because this scan holds all components."""
    components = len(image.layer) if isinstance(image, JpegImageFile) else 0
    # The number of components follows the marker and the length of the scan's header, of two bytes
    # each.
    in_scan = data[first_scan + 4 : first_scan + 5]
    return "progressive" not in image.info and in_scan == bytes([components & 255])


def _first_scan(data: bytes) -> int:
    """Check a JPEG's header. Return the position of its first scan, or the end of the data."""
    # Pillow parses the header in Python, and byte by byte between segments. Limit both, because a
    # hostile header would take long.
    position, junk = 2, 0
    for _ in range(_MAX_SEGMENTS):
        match = _JPEG_MARKER.search(data, position)
        start = match.start() if match else len(data)
        junk += start - position
        if junk > _MAX_JUNK:
            raise ImageError(f"the image's header has over {_MAX_JUNK} bytes outside of segments")
        if match is None or match[0] == _START_OF_SCAN:
            return start
        position = _end_of_segment(data, start)
    raise ImageError(f"the image's header has more than {_MAX_SEGMENTS} segments")


def _check_scans(data: bytes, position: int, allowed: int) -> None:
    """Reject a JPEG with more than `allowed` scans, or too many segments after its header.

    `position` is that of the first scan.
    """
    scans = 0
    for _ in range(_MAX_SEGMENTS):
        match = _MARKER_AFTER_SCAN.search(data, position)
        if match is None or match[0] == _END_OF_JPEG:
            return
        scans += match[0] == _START_OF_SCAN
        if scans > allowed:
            raise ImageError(f"the image has more than the {allowed} scans allowed for its size")
        position = _end_of_segment(data, match.start())
    raise ImageError(f"the image has more than {_MAX_SEGMENTS} segments")


def _end_of_segment(data: bytes, start: int) -> int:
    """Return the end of the JPEG segment whose marker is at `start`."""
    position = start + 2
    *_, segment = MARKER.get(int.from_bytes(data[start:position]), (None,))
    if segment is None:  # a marker alone; segments begin with their length
        return position
    return position + max(2, int.from_bytes(data[position : position + 2]))


def _occurrences(pair: bytes, data: bytes) -> int:
    """Count the occurrences of a pair of bytes."""
    # NumPy takes a fifth of the time of `bytes.count`.
    (number,) = np.frombuffer(pair, np.uint16)
    pairs = (np.frombuffer(data, np.uint16, (len(data) - odd) // 2, odd) for odd in (0, 1))
    return sum(int(np.count_nonzero(half == number)) for half in pairs)


def _check_png(data: bytes) -> None:
    """Reject a PNG with over `_MAX_CHUNKS` chunks."""
    # Pillow reads each chunk in Python, so a file of many tiny chunks would take long.
    position = 8
    for _ in range(_MAX_CHUNKS):
        if position >= len(data):
            return
        position += 12 + int.from_bytes(data[position : position + 4])
    raise ImageError(f"the image has more than {_MAX_CHUNKS} chunks")


def _rgb_from_image(image: ImageFile, orientation: int) -> NDArray[np.uint8]:
    # Read `tile` before `load`, which empties this attribute.
    is_deep = isinstance(image, PngImageFile) and "16B" in str(image.tile)
    image.load()
    return upright_rgb(image, orientation, _excess_bits(image) if is_deep else 0)


def _excess_bits(image: ImageFile) -> int:
    """Return the number of low bits to drop from a loaded 16-bit image, 0 if Pillow has done so.

    Raises:
        ImageError: a colour image would turn dark, because Pillow kept only the highest 8 bits.
    """
    extrema: Any = image.getextrema()
    is_grey = image.mode.startswith("I;16")
    maximum = extrema[1] if is_grey else max(high for _, high in extrema[:3]) << 8 | 0xFF
    depth = next(depth for depth in _DEPTHS if maximum < 1 << depth)
    if is_grey:
        return depth - 8
    if depth < _DEPTHS[-1]:
        raise ImageError(
            f"the image has 16 bits per channel, but its colours fit in {depth} and would turn "
            "dark; convert it to 8 bits per channel"
        )
    return 0

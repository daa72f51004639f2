"""Checks that reject images that are too large, too small, or too slow to decode."""

import re

import numpy as np
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import MARKER, JpegImageFile

from .bundle.spec import MAX_PIXELS
from .jpeg_headers import MAX_PIXELS_PER_BYTE

# Minimum height and width of an image in pixels.
MIN_SIDE = 8
# Maximum size of an image file in bytes: twice that of an uncompressed TIFF of `MAX_PIXELS` RGBA
# pixels with 16 bits per channel.
MAX_FILE_BYTES = 1 << 30

END_OF_JPEG = b"\xff\xd9"
_START_OF_SCAN = b"\xff\xda"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
# Markers that end the data of a scan: all markers but restart markers and reserved ones.
_MARKER_AFTER_SCAN = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]", re.DOTALL)
# Maximum number of scans of a JPEG, and maximum number of pixels in all scans together. Each scan
# is a pass over all pixels. Progressive JPEGs have about ten scans.
_MAX_SCANS, _MAX_SCANNED_PIXELS = 100, 16 * MAX_PIXELS
# Markers of arithmetic coding, with which a block of 64 pixels can take less than one bit. The
# limit `MAX_PIXELS_PER_BYTE` does not apply to such files.
_ARITHMETIC_CODING = (b"\xff\xc9", b"\xff\xca")
# Maximum number of segments before the first scan of a JPEG. The same limit applies to the rest of
# the file. A large colour profile or description takes hundreds of segments.
_MAX_SEGMENTS = 2000
# Maximum bytes between the segments of a JPEG's header.
_MAX_JUNK = 4096
# Maximum number of chunks of a PNG. With the usual 8 KiB per chunk, the largest allowed image has
# fewer chunks.
_MAX_CHUNKS = 100_000


class ImageError(ValueError):
    """Invalid image; the message is one sentence with the reason."""


def image_error_from_os_error(error: OSError) -> ImageError:
    """Convert the OSError of an unreadable image file to an `ImageError`."""
    return ImageError(f"the file cannot be read ({error.strerror or error})")


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Check the size of an image.

    Raises:
        ImageError: the image has over `max_pixels` pixels, or a side is shorter than `MIN_SIDE`.
    """
    size = f"the image is {height}x{width} pixels (height x width)"
    if height * width > max_pixels:
        raise ImageError(
            f"{size}, more than the {max_pixels} pixels allowed; use a smaller image (a server has "
            "the setting max_pixels for this limit)"
        )
    if min(height, width) < MIN_SIDE:
        raise ImageError(
            f"{size}, but each side must have at least {MIN_SIDE} pixels; use a larger image"
        )


def check_file_size(size: int) -> None:
    """Raise `ImageError` if a file of `size` bytes is larger than `MAX_FILE_BYTES`."""
    if size > MAX_FILE_BYTES:
        raise ImageError(
            f"the file has {size:,} bytes, more than the {MAX_FILE_BYTES:,} allowed; use a smaller "
            "file"
        )


def check_jpeg(image: ImageFile, data: bytes, first_scan: int) -> None:
    """Check that a JPEG is not truncated, and not much slower to decode than usual for its size.

    Args:
        image: the opened image.
        data: the whole file.
        first_scan: index of the first scan's marker in `data`, from `find_first_scan`.

    Raises:
        ImageError: the data are too short for the number of pixels, or have too many scans or
            marker segments.
    """
    pixels = image.height * image.width
    is_huffman = not any(marker in data[:first_scan] for marker in _ARITHMETIC_CODING)
    if is_huffman and pixels > MAX_PIXELS_PER_BYTE * (len(data) - first_scan):
        raise ImageError(f"the image is truncated: {len(data)} bytes cannot hold {pixels} pixels")
    allowed = min(_MAX_SCANS, _MAX_SCANNED_PIXELS // pixels)
    if ends_with_scan(image, data, first_scan):
        return
    # This count is fast but can be too high: it includes the scans of thumbnails, and of videos
    # after the end of the image. If it exceeds the limit, count the image's own scans.
    if _occurrences(_START_OF_SCAN, data) > allowed:
        _check_scans(data, first_scan, allowed)


def ends_with_scan(image: ImageFile, data: bytes, first_scan: int) -> bool:
    """Whether decoders stop after the first scan of a JPEG.

    They stop if the JPEG is not progressive and its first scan holds all colour components.
    `first_scan` is the index of the first scan's marker in `data`.
    """
    components = len(image.layer) if isinstance(image, JpegImageFile) else 0
    # The number of components follows the scan's marker (two bytes) and header length (two bytes).
    in_scan = data[first_scan + 4 : first_scan + 5]
    return "progressive" not in image.info and in_scan == bytes([components & 255])


def find_first_scan(data: bytes) -> int:
    """Check a JPEG's header, and return the index of the first scan's marker in `data`.

    If there is no scan, return the length of `data`.

    Raises:
        ImageError: the header has too many marker segments, or too many bytes between them.
    """
    # Pillow parses the header in Python, and reads byte by byte between segments. Limit the number
    # of segments and of bytes between them, because a hostile header would take long.
    position, junk = 2, 0
    for _ in range(_MAX_SEGMENTS):
        match = _JPEG_MARKER.search(data, position)
        start = match.start() if match else len(data)
        junk += start - position
        if junk > _MAX_JUNK:
            raise ImageError(
                f"the JPEG header has more than {_MAX_JUNK} bytes between its marker segments; "
                "save the image again"
            )
        if match is None or match[0] == _START_OF_SCAN:
            return start
        position = _end_of_segment(data, start)
    raise ImageError(
        f"the JPEG header has more than {_MAX_SEGMENTS} marker segments; save the image again "
        "without its metadata"
    )


def _check_scans(data: bytes, position: int, allowed: int) -> None:
    """Raise `ImageError` if a JPEG has over `allowed` scans, or too many marker segments.

    The marker segments before the first scan are not counted. `position` is the index of the first
    scan's marker in `data`.
    """
    scans = 0
    for _ in range(_MAX_SEGMENTS):
        match = _MARKER_AFTER_SCAN.search(data, position)
        if match is None or match[0] == END_OF_JPEG:
            return
        scans += match[0] == _START_OF_SCAN
        if scans > allowed:
            raise ImageError(
                f"the JPEG has more than the {allowed} scans allowed for its size; save the image "
                "again as a baseline JPEG"
            )
        position = _end_of_segment(data, match.start())
    raise ImageError(
        f"the JPEG has more than {_MAX_SEGMENTS} marker segments after its header; save the image "
        "again without its metadata"
    )


def _end_of_segment(data: bytes, start: int) -> int:
    """Return the index after the last byte of a JPEG segment, whose marker is at index `start`."""
    position = start + 2
    *_, segment = MARKER.get(int.from_bytes(data[start:position]), (None,))
    if segment is None:  # this marker stands alone; after others, the segment's length follows
        return position
    return position + max(2, int.from_bytes(data[position : position + 2]))


def _occurrences(pair: bytes, data: bytes) -> int:
    """Count the occurrences of a pair of bytes at any position of `data`."""
    # NumPy takes a fifth of the time of `bytes.count`.
    (number,) = np.frombuffer(pair, np.uint16)
    pairs = (np.frombuffer(data, np.uint16, (len(data) - odd) // 2, odd) for odd in (0, 1))
    return sum(int(np.count_nonzero(half == number)) for half in pairs)


def check_png(data: bytes) -> None:
    """Raise `ImageError` if a PNG has more than `_MAX_CHUNKS` chunks."""
    # Pillow reads each chunk in Python, so a file of many tiny chunks would take long.
    position = 8
    for _ in range(_MAX_CHUNKS):
        if position >= len(data):
            return
        position += 12 + int.from_bytes(data[position : position + 4])
    raise ImageError(
        f"the PNG has more than {_MAX_CHUNKS} chunks; save the image again without its metadata"
    )

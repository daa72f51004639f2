"""Fast reading of the headers of simple JPEGs, which have a single scan and no metadata."""

from struct import Struct
from typing import Final

# Maximum number of pixels per byte of a JPEG: each block of 64 pixels takes at least one bit.
MAX_PIXELS_PER_BYTE: Final = 8 * 64

_START: Final = b"\xff\xd8"
# Marker and length of a segment.
_SEGMENT: Final = Struct(">HH")
_START_OF_SCAN: Final = 0xFFDA
# Markers of the accepted segments: JFIF header, comment, quantization tables, Huffman tables, and
# interval of restart markers.
_SEGMENTS: Final = (0xFFE0, 0xFFFE, 0xFFDB, 0xFFC4, 0xFFDD)
# Start-of-frame markers that are accepted: those of sequential Huffman coding.
_FRAMES: Final = (0xFFC0, 0xFFC1)
_BITS: Final = b"\x08"
# Count and identifiers of the components of grey and of YCbCr images.
_COMPONENTS: Final = (b"\1\1", b"\3\1\2\3")
_MAX_SEGMENTS: Final = 32


def size_of_usual_jpeg(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a simple JPEG: grey or YCbCr, a single scan, and no metadata.

    Return None if the data is not such a JPEG, or is damaged.
    """
    # This parser takes a quarter of Pillow's time. The server calls it in its event loop, where
    # other requests would wait for it.
    position, frame = len(_START), b""
    if not data.startswith(_START):
        return None
    for _ in range(_MAX_SEGMENTS):
        start = position + _SEGMENT.size
        if start > len(data):
            return None
        marker, length = _SEGMENT.unpack_from(data, position)
        position += 2 + length
        if marker == _START_OF_SCAN:
            segment = data[start:position]
            height, width = int.from_bytes(frame[1:3]), int.from_bytes(frame[3:5])
            has_all = segment[:1] == frame[5:6] != b""
            fits = height * width <= MAX_PIXELS_PER_BYTE * (len(data) - position)
            return (height, width) if has_all and fits else None
        if marker in _FRAMES and not frame:
            frame = data[start:position]
            if frame[:1] != _BITS or frame[5:6] + frame[6::3] not in _COMPONENTS:
                return None
        elif marker not in _SEGMENTS:
            return None
    return None

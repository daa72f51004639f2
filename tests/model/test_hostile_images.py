"""Images crafted to take much time or memory to decode."""

import json
import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any

from PIL import Image

from maskrcnn_trt.model.image_decoding import decode_image

_MIB = 1 << 20


def encoded(size: tuple[int, int], codec: str, **options: Any) -> bytes:
    file = BytesIO()
    Image.new("RGB", size, (200, 100, 50)).save(file, codec, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(before: bytes = b"", after: bytes = b"", pixels: bytes | None = None) -> bytes:
    """Return a black PNG of 100x100 with additional chunks. `pixels` are compressed."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 100, 100, 8, 2, 0, 0, 0))
    idat = chunk(b"IDAT", pixels or zlib.compress(bytes(301 * 100)))
    return b"\x89PNG\r\n\x1a\n" + header + before + idat + after + chunk(b"IEND", b"")


def jpeg(inserted: bytes) -> bytes:
    """Return a JPEG of 64x64 with bytes inserted after its first marker."""
    data = encoded((64, 64), "JPEG")
    return data[:2] + inserted + data[2:]


def jpeg_of_many_scans(number: int, content: bytes = b"\0") -> bytes:
    """Return a progressive JPEG whose last scan is repeated with other content."""
    data = encoded((800, 800), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    header = data[start : start + 2 + int.from_bytes(data[start + 2 : start + 4])]
    return data[:-2] + (header + content) * number + data[-2:]


def with_size(data: bytes, side: int, frame: bytes = b"\xff\xc0") -> bytes:
    """Replace the size in a JPEG's frame header by a square."""
    start = data.index(frame) + 5
    return data[:start] + struct.pack(">HH", side, side) + data[start + 4 :]


@cache
def bomb() -> bytes:
    """Return 500 MiB in few bytes."""
    return zlib.compress(bytes(500 * _MIB), 9)


_EMPTY_EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\0"
_HUGE_TAG = struct.pack(">HHII", 0x0112, 4, 1 << 28, 8)
_HOSTILE_EXIF = b"MM\0*\0\0\0\x08\xff\xff" + _HUGE_TAG * 65535

REJECTED: dict[str, tuple[Callable[[], bytes], str]] = {
    "scans": (lambda: jpeg_of_many_scans(5000), "more than the 100 scans"),
    "scans behind a comment with an end": (
        lambda: between_scans(b"\xff\xfe\0\4\xff\xd9", jpeg_of_many_scans(5000)),
        "more than the 100 scans",
    ),
    "segments after scans": (
        lambda: between_scans(b"\xff\xe5\0\4\xff\xda" * 3 * _MIB),
        "more than 2000 marker segments",
    ),
    "fill bytes": (lambda: jpeg(b"\xff" * 20 * _MIB), "4096 bytes between its marker segments"),
    "junk": (lambda: jpeg(b"\xff\xe1\0\2" + bytes(20 * _MIB)), "bytes between its marker"),
    "escapes": (lambda: jpeg(b"\xff\xd0" + b"\xff\0" * 10 * _MIB), "bytes between its marker"),
    "segments": (lambda: jpeg(b"\xff\xe5\0\2" * 5 * _MIB), "more than 2000 marker"),
    "markers": (lambda: jpeg(b"\xff\xd0" * 10 * _MIB), "more than 2000 marker"),
    "reserved markers": (lambda: jpeg(b"\xff\xf0\xff\xff" * 5 * _MIB), "more than"),
    "65500x65500": (lambda: with_size(encoded((64, 64), "JPEG"), 65500), "pixels allowed"),
    "8000x8000 in few bytes": (lambda: with_size(encoded((64, 64), "JPEG"), 8000), "truncated"),
    "scans of 6000x6000": (
        lambda: with_size(jpeg_of_many_scans(50, bytes(2000)), 6000, b"\xff\xc2"),
        "more than the 28 scans",
    ),
    "chunks": (lambda: png(before=chunk(b"tEXt", b"a\0b") * 500_000), "100000 chunks"),
    "chunks behind": (lambda: png(after=chunk(b"tEXt", b"a\0b") * 500_000), "100000 chunks"),
    "text bomb": (lambda: png(before=chunk(b"zTXt", b"k\0\0" + bomb())), "too large"),
    "text bomb behind": (lambda: png(after=chunk(b"iTXt", b"k\0\1\0\0\0" + bomb())), "too large"),
    "profile bomb": (lambda: png(before=chunk(b"iCCP", b"k\0\0" + bomb())), "too large"),
}


def between_scans(inserted: bytes, data: bytes | None = None) -> bytes:
    """Return a progressive JPEG with bytes inserted after its first scan."""
    data = data or encoded((64, 64), "JPEG", progressive=True)
    start = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    return data[:start] + inserted + data[start:]


def animation(codec: str) -> bytes:
    """Return an animation of sixty frames in few bytes."""
    frames = [Image.new("RGB", (500, 500), (shade, 0, 0)) for shade in range(60)]
    file = BytesIO()
    frames[0].save(file, codec, save_all=True, append_images=frames[1:])
    return file.getvalue()


READ: dict[str, Callable[[], bytes]] = {
    "too many pixels of a PNG": lambda: png(pixels=bomb()),
    "EXIF": lambda: png(before=chunk(b"eXIf", _HOSTILE_EXIF)),
    "large EXIF of a WebP": lambda: encoded(
        (100, 100), "WEBP", exif=_EMPTY_EXIF + bytes(30 * _MIB)
    ),
    "profile": lambda: jpeg((b"\xff\xe2\xff\xff" + bytes(65533)) * 500),
    "fill bytes after the pixels": lambda: (
        encoded((64, 64), "JPEG")[:-2] + b"\xff" * 20 * _MIB + b"\xd9"
    ),
    "video behind the end": lambda: encoded((64, 64), "JPEG") + b"\xff\xda\0\x08" * 5 * _MIB,
    "images behind the end": lambda: encoded((64, 64), "JPEG") + jpeg_of_many_scans(5000),
    "scans in a comment": lambda: jpeg(b"\xff\xfe\x80\0" + b"\xff\xda" * 0x3FFF),
    "fill bytes between scans": lambda: between_scans(b"\xff" * 20 * _MIB),
    "frames of a JPEG": lambda: encoded(
        (600, 600), "MPO", save_all=True, append_images=[Image.new("RGB", (600, 600))] * 50
    ),
    "frames of a PNG": lambda: animation("PNG"),
    "frames of a WebP": lambda: animation("WEBP"),
}

# Reads images under limits of CPU time and memory, which end the process if they are exceeded.
LIMITED = """
import json, pickle, resource, sys
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.model.image_decoding import decode_image, read_header

resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def outcome(data):
    try:
        header = read_header(data)
        return decode_image(data).shape[:2] == header.size
    except ImageError as error:
        return str(error)


images = pickle.load(sys.stdin.buffer)
print(json.dumps({name: outcome(data) for name, data in images.items()}))
"""


def test_hostile_images_take_little_time_and_memory() -> None:
    images = {name: make() for name, (make, _) in REJECTED.items()}
    images |= {name: make() for name, make in READ.items()}
    run = subprocess.run(
        [sys.executable, "-c", LIMITED], input=pickle.dumps(images), capture_output=True
    )
    assert run.returncode == 0, run.stderr
    outcomes = json.loads(run.stdout)
    assert {name: outcomes[name] for name in READ} == dict.fromkeys(READ, True)
    for name, (_, message) in REJECTED.items():
        assert message in outcomes[name], name


def test_usual_scans_and_segments_are_read() -> None:
    assert decode_image(jpeg_of_many_scans(80)).shape == (800, 800, 3)
    assert decode_image(jpeg((b"\xff\xe1\xff\xff" + bytes(65533)) * 300)).shape == (64, 64, 3)
    assert decode_image(jpeg(b"\xff" * 1000)).shape == (64, 64, 3)
    many = png(before=chunk(b"tEXt", b"a\0b") * 50_000)
    assert decode_image(many).shape == (100, 100, 3)

"""BMP and TIFF files become PNG without loss."""

import os
import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.ExifTags import Base

from maskrcnn_trt.model.image_decoding import decode_image
from maskrcnn_trt.model.image_files import read_image_file
from maskrcnn_trt.model.image_limits import MAX_FILE_BYTES, ImageError
from maskrcnn_trt.training.data.image_sizes import read_header_size

HEIGHT, WIDTH = 12, 20
PIXELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
GREY = PIXELS[:, :, 0]
BIG_ENDIAN = (GREY.astype(np.uint16) << 4).astype(">u2").tobytes()


def encoded(pixels: NDArray[Any] | Image.Image, image_format: str, **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def decoded(data: bytes, folder: Path) -> NDArray[np.uint8]:
    (folder / "image").write_bytes(data)
    return decode_image(read_image_file(folder / "image"))


def deep_tiff(pixels: NDArray[np.uint8]) -> bytes:
    """Return a TIFF of 16 bits per colour channel, which Pillow does not write."""
    values = {256: WIDTH, 257: HEIGHT, 258: 16, 259: 1, 262: 2, 273: 122, 277: 3, 278: HEIGHT}
    values[279] = 2 * pixels.size
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    header = b"II*\0" + struct.pack("<IH", 8, len(values)) + tags + bytes(4)
    return header + pixels.astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encoded(PIXELS, "BMP"), PIXELS),
        (encoded(GREY, "BMP"), GREY[..., None]),
        (encoded(PIXELS, "TIFF"), PIXELS),
        (encoded(PIXELS, "TIFF", compression="tiff_lzw"), PIXELS),
        (encoded(PIXELS, "TIFF", compression="tiff_adobe_deflate"), PIXELS),
        (encoded(GREY, "TIFF"), GREY[..., None]),
        (encoded(GREY > 127, "TIFF"), 255 * (GREY > 127)[..., None]),
        (encoded(np.dstack([PIXELS, GREY]), "TIFF"), PIXELS),
        # 12 of 16 bits, in both byte orders.
        (encoded(GREY.astype(np.uint16) << 4, "TIFF"), GREY[..., None]),
        (encoded(Image.frombytes("I;16B", (WIDTH, HEIGHT), BIG_ENDIAN), "TIFF"), GREY[..., None]),
        (encoded(PIXELS, "PNG"), PIXELS),
    ],
)
def test_pixels(data: bytes, expected: NDArray[Any], tmp_path: Path) -> None:
    assert (decoded(data, tmp_path) == np.broadcast_to(expected, PIXELS.shape)).all()


def test_first_page_is_read(tmp_path: Path) -> None:
    pages = {"save_all": True, "append_images": [Image.new("L", (30, 30))]}
    assert (decoded(encoded(PIXELS, "TIFF", **pages), tmp_path) == PIXELS).all()


@pytest.mark.parametrize("mode", ["RGB", "I;16"])
@pytest.mark.parametrize("orientation", range(10))
def test_tiff_keeps_its_orientation(orientation: int, mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(PIXELS if mode == "RGB" else GREY.astype(np.uint16) << 8)
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    (tmp_path / "image").write_bytes(encoded(image, "TIFF", exif=exif))
    png = read_image_file(tmp_path / "image")
    stored, upright = (decode_image(png, apply_orientation=rule) for rule in (False, True))
    expected = PIXELS if mode == "RGB" else np.dstack([GREY] * 3)
    assert (stored == expected).all()
    as_png = encoded(Image.fromarray(expected), "PNG", exif=exif)
    assert (upright == decode_image(as_png)).all()
    turned = orientation if 1 <= orientation <= 8 else 1
    assert read_header_size(tmp_path / "image") == (stored.shape[:2], upright.shape[:2], turned)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(PIXELS, "TIFF")[:200], "damaged"),
        (encoded(PIXELS, "BMP")[:100], "damaged"),
        (b"BM, a text", "damaged"),
        (encoded(PIXELS[:4], "BMP"), "at least 8"),
        (encoded(GREY.astype(np.float32), "TIFF"), "mode F"),
        (encoded(GREY.astype(np.uint16), "TIFF", tiffinfo={339: 2}), "mode I "),  # signed
        (deep_tiff(PIXELS), "lowest 8 bits.* 8 bits per channel"),
        (b"GIF89a", "not a JPEG, PNG, WebP, BMP or TIFF"),
    ],
)
def test_unusable_files(data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=reason):
        decoded(data, tmp_path)


@pytest.mark.parametrize("start", [b"", b"\xff\xd8\xff"])
def test_huge_files_are_rejected_unread(start: bytes, tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(start)
    size = MAX_FILE_BYTES + 1 if start else MAX_FILE_BYTES  # without a signature, any size
    os.truncate(path, size)
    with pytest.raises(ImageError, match=f"{size:,} bytes" if start else "not a JPEG"):
        read_image_file(path)


def test_pipes_and_devices_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ImageError, match="pipe or a device"):
            read_image_file(path)

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from maskrcnn_trt.model import upright_images
from maskrcnn_trt.model.image_decoding import ImageHeader, decode_image, read_header
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.model.jpeg_headers import size_of_usual_jpeg


def encoded(image: Image.Image, codec: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, codec, **options)
    return buffer.getvalue()


def gradient(height: int = 24, width: int = 40) -> NDArray[np.uint8]:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 6, y * 10, (x + y) * 3], axis=-1).astype(np.uint8)


def png(height: int, width: int, rows: bytes, depth: int = 8) -> bytes:
    """Return a colour PNG of filtered rows."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows) if rows else b""), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def test_lossless_formats_come_back_exactly() -> None:
    for data in (
        encoded(Image.fromarray(gradient())),
        encoded(Image.fromarray(gradient()), "WEBP", lossless=True),
    ):
        image = decode_image(data)
        np.testing.assert_array_equal(image, gradient())
        assert image.dtype == np.uint8
        assert image.flags.writeable


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_modes_keep_their_colours(mode: str) -> None:
    source = Image.fromarray(gradient()).convert(mode)
    image = decode_image(encoded(source, "JPEG", quality=98, subsampling=0))
    difference = np.abs(image.astype(int) - np.asarray(source.convert("RGB")))
    assert difference.mean() < 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "transparent P"])
def test_png_modes_become_rgb(mode: str) -> None:
    source = Image.fromarray(gradient()).convert(mode.removeprefix("transparent "))
    options = {"transparency": bytes(range(256))} if mode == "transparent P" else {}
    expected = np.asarray(source.convert("RGB"))
    np.testing.assert_array_equal(decode_image(encoded(source, **options)), expected)


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_16_bit_grey_is_scaled_by_the_bits_it_holds(bits: int) -> None:
    deep = np.linspace(0, (1 << bits) - 1, 24 * 40).astype(np.uint16).reshape(24, 40)
    image = decode_image(encoded(Image.fromarray(deep)))
    np.testing.assert_array_equal(image, np.repeat((deep >> bits - 8)[..., None], 3, axis=2))
    assert image.max() == 255


@pytest.mark.parametrize("bits", [8, 12, 14, 16])
def test_16_bit_colours_are_rejected_if_they_would_turn_dark(bits: int) -> None:
    deep = np.random.default_rng(0).integers(0, 1 << bits, (24, 40, 3), np.uint16)
    deep[0, 0] = (1 << bits) - 1
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    data = png(24, 40, rows, depth=16)
    if bits == 16:
        np.testing.assert_array_equal(decode_image(data), deep >> 8)
    else:
        with pytest.raises(ImageError, match=f"lowest {bits} bits.* 8 bits per channel"):
            decode_image(data)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_image_upright(
    orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Strips of seven rows; the last has three.
    monkeypatch.setattr(upright_images, "_STRIP_PIXELS", 7 * 40)
    upright = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, 1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    for codec in ("JPEG", "PNG", "WEBP"):
        data = encoded(Image.fromarray(gradient()), codec, exif=exif)
        stored = decode_image(data, apply_orientation=False)
        assert stored.shape == (24, 40, 3)
        np.testing.assert_array_equal(decode_image(data), upright(stored))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the image is empty"),
        (b"Hello, world\n" * 100, "not a JPEG, PNG or WebP"),
        (encoded(Image.fromarray(gradient()), "BMP"), "not a JPEG, PNG or WebP"),
        (encoded(Image.fromarray(gradient()), "JPEG")[:40], "damaged"),
        (encoded(Image.fromarray(gradient()), "JPEG")[:-60], "truncated"),
        (encoded(Image.fromarray(gradient()))[:-50], "truncated"),
        (encoded(Image.fromarray(gradient()), "WEBP")[:-100], "damaged"),
        (b"\x89PNG\r\n\x1a\n" + b"\x00" * 64, "damaged"),
        (b"RIFF\x00\x00\x00\x00WEBP", "damaged"),
        (encoded(Image.new("RGB", (1, 1))), "1x1 pixels.*at least 8"),
        (encoded(Image.new("RGB", (7, 100))), "100x7 pixels.*at least 8"),
        (png(20000, 20000, b""), "20000x20000 pixels.*more than the 64000000"),
    ],
)
def test_invalid_data_is_rejected_in_one_sentence(data: bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        decode_image(data)
    assert "\n" not in str(caught.value)


def test_limit_on_pixels_is_inclusive() -> None:
    data = encoded(Image.fromarray(gradient()))
    assert decode_image(data, max_pixels=24 * 40).shape == (24, 40, 3)
    with pytest.raises(ImageError, match=r"more than the 959 pixels.*max_pixels"):
        decode_image(data, max_pixels=24 * 40 - 1)


def png_with_metadata_after_pixels(data: bytes) -> bytes:
    """Move the chunk `eXIf` of a PNG to its end."""
    start = data.index(b"eXIf") - 4
    stop = start + 12 + struct.unpack(">I", data[start : start + 4])[0]
    end = data.index(b"IEND") - 4
    return data[:start] + data[stop:end] + data[start:stop] + data[end:]


@pytest.mark.parametrize("codec", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8, 9])
def test_header_holds_the_size_after_decoding(codec: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(gradient()), codec, exif=exif)
    variants = [data]
    if codec == "PNG":
        variants.append(png_with_metadata_after_pixels(data))
    for variant in variants:
        header = read_header(variant)
        assert header.size == decode_image(variant).shape[:2]
        assert header.orientation == (orientation if orientation < 9 else 1)
        stored = read_header(variant, apply_orientation=False)
        assert (stored.size, stored.orientation) == ((24, 40), 1)


def test_header_is_read_without_the_pixels() -> None:
    assert read_header(png(30, 50, b"")).size == (30, 50)
    with pytest.raises(ImageError, match="damaged"):
        decode_image(png(30, 50, b""))
    with pytest.raises(ImageError, match="more than the 1000 pixels"):
        read_header(png(30, 50, b""), max_pixels=1000)


def test_plain_jpegs_are_distinguished_from_others() -> None:
    source = Image.fromarray(gradient())
    data = encoded(source, "JPEG")
    for plain in (data, encoded(source.convert("L"), "JPEG"), data + bytes(100)):
        assert read_header(plain).is_plain_jpeg
    stored_as_rgb = encoded(source, "JPEG", keep_rgb=True)
    cmyk, png = encoded(source.convert("CMYK"), "JPEG"), encoded(source, "PNG")
    for other in (data[:-2], stored_as_rgb, cmyk, png):
        assert not read_header(other).is_plain_jpeg


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(
    ("options", "is_usual"),
    [
        ({}, True),
        ({"subsampling": 2, "comment": b"a comment", "restart_marker_rows": 1}, True),
        ({"progressive": True}, False),
        ({"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}, False),
    ],
)
def test_usual_jpegs_are_read_without_pillow(
    mode: str, options: dict[str, Any], is_usual: bool
) -> None:
    file = BytesIO()
    Image.new(mode, (50, 30)).save(file, "JPEG", **options)
    data = file.getvalue()
    assert size_of_usual_jpeg(data) == ((30, 50) if is_usual else None)
    assert read_header(data) == ImageHeader((30, 50), 1, True)
    for end in range(0, data.index(b"\xff\xda"), 7):
        assert size_of_usual_jpeg(data[:end]) is None

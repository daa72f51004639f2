"""Benchmark images: the `--images` option, generated JPEGs, and batches of model input."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...model.bundle.spec import ShapeBucket
from ...model.image_decoding import decode_image
from ...model.image_files import errors_of_file, read_image_file
from ...model.plurals import counted
from ...model.resizing import resize_image

# Side in pixels of the squares that noise images consist of.
_SQUARE = 16
# Photo-like JPEGs: numbers of landscape and of portrait images, their sides in pixels, and the
# standard deviation of the noise in pixel values. More noise makes larger files.
_LANDSCAPES, _PORTRAITS = 12, 4
_SHORT, _LONG = 480, 640
_NOISE = 18.0

PHOTO_LIKE = (
    f"{_LANDSCAPES + _PORTRAITS} generated JPEGs of about 150 kB each, the mean file size in "
    f"COCO: {_LANDSCAPES} of {_SHORT}x{_LONG} pixels (height x width) and {_PORTRAITS} of "
    f"{_LONG}x{_SHORT}. Only those that fit an input size of the model are used"
)


def images_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the option `--images` to a command.

    Args:
        default: description of the images that are used without the option, for the help text.
    """
    return click.option(
        "--images",
        "sources",
        multiple=True,
        type=click.Path(exists=True, path_type=Path),
        help=f"Image file or folder of images to use instead of {default}.",
    )


def read_images(sources: Sequence[Path]) -> list[bytes]:
    """Return the encoded bytes of each image file in `sources`, which are files or folders.

    Without sources, return [].

    Raises:
        click.UsageError: the sources contain no image.
        ImageError: an image is invalid; the message names its file.
    """
    from ...serving.commands.reports import image_files

    return [_checked_image(path) for path in image_files(sources)] if sources else []


def _checked_image(path: Path) -> bytes:
    with errors_of_file(path):
        data = read_image_file(path)
        decode_image(data)  # find invalid images now, while the file name is known
    return data


def describe_images(images: Sequence[bytes], sources: Sequence[Path], default: str) -> str:
    """Return a text such as "3 files (`--images FOLDER`)", or `default` if there are no images."""
    files = counted(len(images), "file")
    options = ", ".join(f"`--images {source}`" for source in sources)
    return f"{files} ({options})" if images else default


def noise_jpeg(size: ShapeBucket) -> bytes:
    """Return a JPEG of randomly coloured squares. The same size always gives the same bytes."""
    shape = (-(-size.height // _SQUARE), -(-size.width // _SQUARE), 3)
    colours = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    squares = colours.repeat(_SQUARE, axis=0).repeat(_SQUARE, axis=1)
    return _jpeg_from(squares[: size.height, : size.width])


def photo_like_jpegs() -> list[bytes]:
    """Return 16 JPEGs of noisy colour gradients, 12 of 480x640 pixels and 4 of 640x480.

    Sizes are height x width. The seeds are fixed: every call returns the same bytes.
    """
    sizes = [(_SHORT, _LONG)] * _LANDSCAPES + [(_LONG, _SHORT)] * _PORTRAITS
    return [_photo_like_jpeg(seed, *size) for seed, size in enumerate(sizes)]


def batch_from_encoded(
    images: Sequence[bytes], bucket: ShapeBucket, count: int
) -> NDArray[np.uint8]:
    """Decode images, stretch each to the size `bucket`, and return them as one batch.

    If there are fewer than `count` images, they are repeated.

    Returns:
        uint8 RGB pixels [count, 3, H, W], with H and W of `bucket`.

    Raises:
        ImageError: a file cannot be decoded.
    """
    decoded = [resize_image(decode_image(data), *bucket) for data in images[:count]]
    batch = np.stack([decoded[i % len(decoded)] for i in range(count)])
    return np.ascontiguousarray(batch.transpose(0, 3, 1, 2))


def _photo_like_jpeg(seed: int, height: int, width: int) -> bytes:
    random = np.random.default_rng(seed)
    colours = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8))
    smooth = np.asarray(colours.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    noisy = smooth + random.normal(0, _NOISE, (height, width, 1))
    return _jpeg_from(noisy.clip(0, 255).astype(np.uint8))


def _jpeg_from(pixels: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()

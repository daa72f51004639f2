"""Reading of the user's own images: files, contents of files, or pixels.

BMP and TIFF files are converted to PNG. Pillow's BMP and TIFF decoders do not limit their time and
memory for hostile data. Therefore the server rejects these formats, and programs that read the
user's own files convert them. This module does not import torch.
"""

import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags
from PIL.BmpImagePlugin import BmpImageFile
from PIL.Image import Exif, Image, fromarray
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from .bundle.manifest import Preprocessing
from .bundle.spec import MAX_PIXELS
from .image_decoding import IMAGE_SUFFIXES, decode_image, excess_bits, plugin_for
from .image_limits import ImageError, check_file_size, check_size, image_error_from_os_error
from .resizing import Pixels, resize_image, resized_size
from .upright_images import TRANSPOSES

# Input image: content of a JPEG, PNG or WebP file, path of an image file, or RGB pixels [H, W, 3].
ImageSource = bytes | Path | NDArray[np.uint8]

# Lower-case suffixes by which image files in a folder are recognised.
IMAGE_FILE_SUFFIXES = IMAGE_SUFFIXES | {".bmp", ".tif", ".tiff"}

_PLUGINS: dict[bytes, type[ImageFile]] = {
    b"BM": BmpImageFile,
    b"II*\0": TiffImageFile,
    b"MM\0*": TiffImageFile,
}
# Pillow's modes that PNG stores without loss, and modes that are converted to RGB first.
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_COLOUR_MODES = ("CMYK", "YCbCr", "LAB", "RGBX", "RGBa", "PA")
# EXIF orientations whose rotations undo each other. The transposition of any other orientation
# undoes itself.
_OPPOSITES = {6: 8, 8: 6}


@contextmanager
def errors_of_file(path: Path) -> Iterator[None]:
    """Context manager: put `path` before the message of an `ImageError` that the block raises.

    An `OSError` becomes such an `ImageError`.
    """
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error
    except OSError as error:
        raise ImageError(f"{path}: {image_error_from_os_error(error)}") from error


def is_image_file(path: PurePath, suffixes: Collection[str] = IMAGE_FILE_SUFFIXES) -> bool:
    """Whether a file is an image, judged by its name alone.

    `suffixes` are the accepted suffixes in lower case.
    """
    # On file systems of other platforms, macOS writes a file `._a.jpg` without pixels beside each
    # `a.jpg`.
    return path.suffix.lower() in suffixes and not path.name.startswith("._")


def image_file_size(path: Path) -> int:
    """Return the size of an image file in bytes.

    Raises:
        OSError: the file does not exist or is not accessible.
        ImageError: the path is a pipe or a device file, or contains a NUL character.
    """
    try:
        status = path.stat()
    except ValueError as error:
        raise ImageError(f"the path is invalid ({error})") from None
    # Pipes and devices may be endless or block, and some callers read the file twice.
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ImageError(
            "the path is a pipe or a device; save the image in a file and give the file's path"
        )
    return status.st_size


def read_image_file(path: Path) -> bytes:
    """Return the content of an image file. A BMP or TIFF image is converted to PNG.

    Raises:
        OSError: the file cannot be read.
        ImageError: the path is a pipe or a device file, the file is larger than `MAX_FILE_BYTES`,
            its format is not supported, or it is a BMP or TIFF image that cannot be converted.
    """
    check_file_size(image_file_size(path))
    with path.open("rb") as file:
        _check_format(file.peek())
        return png_from_other_formats(file.read())


def read_image_source(image: ImageSource) -> bytes | NDArray[np.uint8]:
    """Return the encoded content of an image, or the pixels of an array.

    Raises:
        TypeError: `image` is neither bytes, a `Path`, nor a uint8 array.
        ImageError: the array is empty or not of shape [H, W, 3], or `read_image_file` rejects the
            file.
        OSError: the file cannot be read.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        return read_image_file(image)
    _check_pixels(image)
    return image


def _check_pixels(image: Any) -> None:
    is_array = isinstance(image, np.ndarray)
    if not is_array or image.dtype != np.uint8:
        kind = f"array of {image.dtype}" if is_array else type(image).__name__
        remedy = "; wrap a path in Path" if isinstance(image, str) else ""
        raise TypeError(
            "an image must be the bytes of a file, a pathlib.Path or a uint8 array [H, W, 3], not "
            f"{kind}{remedy}"
        )
    if image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise ImageError(
            f"an array of shape {list(image.shape)} is not an image; it must be [H, W, 3] RGB and "
            "not empty"
        )


def check_images(images: object, protocol: Any = Iterable) -> None:
    """Raise TypeError if `images` is one image, or is not iterable.

    `protocol` is the class of valid iterables: `Iterable`, or a union with `AsyncIterable`.
    """
    # Arrays of four dimensions, and arrays of strings, hold several images.
    is_image = isinstance(images, np.ndarray) and images.ndim < 4 and images.dtype.kind in "biuf"
    is_data = isinstance(images, str | bytes | bytearray | memoryview)
    if is_image or is_data or not isinstance(images, protocol):
        raise TypeError(f"images must be a list of images, not {type(images).__name__}")


def read_resized_image(path: Path, preprocessing: Preprocessing) -> Pixels:
    """Read an image file, and resize the image by the rules of `preprocessing`, without padding.

    Returns:
        [h, w, 3] RGB; float32 with the resize rule `torchvision`, otherwise uint8.

    Raises:
        ImageError: the file cannot be read, or the image is invalid. The message begins with the
            path.
    """
    with errors_of_file(path):
        image = decode_image(read_image_file(path))
    height, width, _ = image.shape
    p = preprocessing
    size = resized_size(height, width, p.min_size, p.max_size, p.resize)
    return resize_image(image, *size, p.resize)


def png_from_other_formats(data: bytes) -> bytes:
    """Convert a BMP or TIFF image to PNG. Return JPEG, PNG, WebP and empty data unchanged.

    Only the first page of a TIFF is converted. The PNG has the EXIF orientation of the TIFF.
    16-bit colour channels are reduced to 8 bits, and colours such as CMYK are converted to RGB. All
    other pixels are converted without loss.

    Raises:
        ImageError: the data are not a BMP, TIFF, JPEG, PNG or WebP image. Or the BMP or TIFF image
            is damaged, is too small, has over `MAX_PIXELS` pixels, or has a pixel type that PNG
            lacks. Or it has 16 bits per colour channel, and its values are so low that it would
            turn dark in 8 bits per channel.
    """
    plugin = _check_format(data)
    if plugin is None:
        return data
    try:
        # PIL.Image.open has a global limit of pixels, so the format's plugin is called directly.
        image = plugin(BytesIO(data))
        check_size(image.height, image.width, MAX_PIXELS)
        has_deep_colours = ";16" in str(image.tile) and not image.mode.startswith("I")
        orientation = image.getexif().get(ExifTags.Base.Orientation) or 1
        image.load()  # Pillow applies the orientation of a TIFF
        png, exif = _png_compatible(image, has_deep_colours), Exif()
        if orientation in TRANSPOSES:
            png = png.transpose(TRANSPOSES[_OPPOSITES.get(orientation, orientation)])
            exif[ExifTags.Base.Orientation] = orientation
        file = BytesIO()
        # Lowest compression level, because the result is decoded soon.
        png.save(file, "PNG", compress_level=1, exif=exif)
    except ImageError:
        raise
    except Exception as error:  # on damaged files, codecs raise exceptions of any type
        raise ImageError(f"the image is truncated or damaged: {error}") from error
    return file.getvalue()


def _check_format(data: bytes) -> type[ImageFile] | None:
    """Return Pillow's reader class for BMP or TIFF data.

    For JPEG, PNG, WebP and empty data, which need no conversion, return None.

    Raises:
        ImageError: the data is not empty, and is not a JPEG, PNG, WebP, BMP or TIFF image.
    """
    plugin = next((own for start, own in _PLUGINS.items() if data.startswith(start)), None)
    if plugin is None and data and plugin_for(data) is None:
        raise ImageError("the data is not a JPEG, PNG, WebP, BMP or TIFF image")
    return plugin


def _png_compatible(image: Image, has_deep_colours: bool) -> Image:
    """Convert a loaded image to a pixel type that PNG can store.

    `has_deep_colours` means that the file has 16 bits per colour channel.
    """
    if has_deep_colours:
        excess_bits(image)  # rejects images that would turn dark
    if image.mode == "I;16B":
        return fromarray(np.asarray(image).astype(np.uint16))
    if image.mode in _COLOUR_MODES:
        return image.convert("RGB")
    if image.mode not in _PNG_MODES:
        raise ImageError(
            f"pixels of Pillow's mode {image.mode} are not supported; convert the image to 8-bit "
            "colours, or to 8-bit or 16-bit grey"
        )
    return image

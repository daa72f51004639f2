"""Sizes of image files, read from their headers."""

import warnings
from pathlib import Path
from typing import NamedTuple

from PIL import ExifTags, Image, UnidentifiedImageError

from ...model.image_files import image_file_size
from ...model.image_limits import ImageError

# Formats that `decode_image` reads, and BMP and TIFF, which `read_image_file` converts to PNG.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
# The EXIF orientations from this one to 8 swap width and height.
_FIRST_SWAPPED = 5


class HeaderSize(NamedTuple):
    """Height and width of an image file in pixels, before and after its EXIF rotation."""

    # Size of the stored pixels.
    stored: tuple[int, int]
    # Size after the EXIF rotation, as annotation tools show the image.
    upright: tuple[int, int]
    # EXIF orientation, 1 to 8; 1 means no rotation.
    orientation: int


def read_header_size(path: Path) -> HeaderSize:
    """Read the size of an image file without reading its pixels.

    Raises:
        ImageError: The file cannot be read, is a pipe or a device, or is not an image in a
            supported format.
    """
    try:
        image_file_size(path)  # rejects pipes, because opening a pipe would block
        with warnings.catch_warnings():
            # The pixels are not decoded, so a large image is harmless here.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                width, height = image.size
                # For a TIFF, Pillow reports the size after the EXIF rotation. For other formats, it
                # reports the stored size.
                is_upright = image.format == "TIFF"
                # Read the EXIF data of a PNG only if they precede the pixels. Otherwise, `getexif`
                # would decode the whole image to find EXIF data after the pixels.
                has_exif = image.format != "PNG" or "exif" in image.info
                orientation = image.getexif().get(ExifTags.Base.Orientation) if has_exif else 1
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError("the file is not a JPEG, PNG, WebP, BMP or TIFF image") from None
    except OSError as error:
        raise ImageError(error.strerror or str(error)) from None
    except Exception as error:  # on damaged files, codecs raise exceptions of any type
        raise ImageError(f"the header is damaged: {error}") from None
    turn = orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1
    opened = (height, width)
    other = (width, height) if turn >= _FIRST_SWAPPED else opened
    return HeaderSize(other, opened, turn) if is_upright else HeaderSize(opened, other, turn)

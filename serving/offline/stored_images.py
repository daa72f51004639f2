"""Images in files, folders and buckets, by way of Arrow's file systems."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import quote

import pyarrow.fs

from ...model.images import IMAGE_SUFFIXES
from ..errors import ServingError, image_error_from_os_error

_PLAIN = "/:?&=%@+,;!$'()*~"
"""What quoting leaves as it is: `?` begins an address's settings, `%` what is quoted already."""


class StoredImages(NamedTuple):
    """Where images are; it can be sent to other processes."""

    stores: tuple[pyarrow.fs.FileSystem, ...]
    places: tuple[tuple[int, str], ...]
    """Of each image, the number of its store and its path there, which is not quoted:
    `/folder/image.jpg` or `bucket/folder/image.jpg`."""


def quoted_address(source: str) -> str:
    """An absolute path as it is, and an address with quotes where no address may be without.

    A `#` is part of a name: Arrow would leave it out, with what follows. `?` and `%` in names have
    to be quoted by those who write the address, as `%3F` and `%25`.
    """
    return quote(source, safe=_PLAIN) if "://" in source else source


def stored_images(sources: Sequence[str]) -> StoredImages:
    """The images among files and folders, each once.

    Folders are gone through to the bottom, unlike those of `results.reports.image_files`: where
    images are many, they lie in folders by date or number, a bucket has no other folders than the
    beginnings of names, and results go by the whole path, so that no two collide.

    Args:
        sources: Absolute paths, or addresses as `s3://bucket/folder`. Files are taken whatever
            their names are; of folders what is named as an image, even if hidden.

    Raises:
        ServingError: a source is not there, there are no images, or a name is not UTF-8.
        OSError, pyarrow.ArrowInvalid: a folder or bucket cannot be looked into.
    """
    stores: list[pyarrow.fs.FileSystem] = []
    places: dict[tuple[int, str], None] = {}
    looked_into = []
    for source in sources:
        files, path = pyarrow.fs.FileSystem.from_uri(quoted_address(source))
        if files not in stores:
            stores.append(files)
        store = stores.index(files)
        places |= dict.fromkeys((store, image) for image in _paths_of_images(files, path))
        looked_into.append(path)
    if not places:
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise ServingError(f"there is no image to detect in: {', '.join(looked_into)} ({suffixes})")
    return StoredImages(tuple(stores), tuple(places))


def _paths_of_images(files: pyarrow.fs.FileSystem, path: str) -> list[str]:
    kind = files.get_file_info(path).type
    if kind is pyarrow.fs.FileType.NotFound:
        raise ServingError(f"there is no image to detect in: {path} is not there")
    if kind is not pyarrow.fs.FileType.Directory:
        return [path]
    try:
        return sorted(
            info.path
            for info in files.get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
            if info.is_file and PurePosixPath(info.path).suffix.lower() in IMAGE_SUFFIXES
        )
    except UnicodeDecodeError as error:
        name = error.object.decode(errors="backslashreplace")
        raise ServingError(f"a name in {path} is not UTF-8: {name}; rename it") from None


def read_image(files: pyarrow.fs.FileSystem, path: str) -> bytes:
    """What the file of an image holds.

    Raises:
        ImageError: it cannot be read.
    """
    try:
        # Not as its name says: what ends in .gz would come uncompressed.
        with files.open_input_stream(path, compression=None) as stream:
            data: bytes = stream.read()
    except OSError as error:
        raise image_error_from_os_error(error) from None
    return data

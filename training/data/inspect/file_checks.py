"""Find image files that are duplicated, not listed in the annotations, or undecodable."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ....model.bundle.spec import MAX_PIXELS
from ....model.image_files import image_file_size, is_image_file
from ....model.image_limits import ImageError, check_size
from ..coco.dataset import ImageRecord
from ..image_sizes import HeaderSize, read_header_size
from .annotation_checks import Suspicion

# Number of bytes at the end of a file that are compared before its whole content.
_TAIL_BYTES = 4096


def suspicious_files(records: Sequence[ImageRecord]) -> list[Suspicion]:
    """Find image files that are listed more than once, and files with equal content."""
    first_by_path: dict[Path, ImageRecord] = {}
    suspicions = [
        Suspicion("file listed more than once", record)
        for record in records
        if first_by_path.setdefault(record.path, record) is not record
    ]
    for first, *others in _equal_files(first_by_path):
        suspicions += [
            Suspicion("file with the content of another", first_by_path[path], detail=f"as {first}")
            for path in others
        ]
    return suspicions


def undecodable_files(
    records: Sequence[ImageRecord], on_image: Callable[[], object] = lambda: None
) -> list[Suspicion]:
    """Find image files that cannot be decoded or do not have the annotated size.

    `on_image` is called after each image.
    """
    # Imported here, because `read_image` needs torch, which takes seconds to import.
    from ..loading.batch_reader import read_image

    def fault_of(record: ImageRecord) -> str | None:
        try:
            read_image(record)
        except ImageError as error:
            return str(error).removeprefix(f"{record.path}: ")
        return None

    suspicions = []
    # Threads suffice, because decoders release the GIL.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for record, fault in zip(records, pool.map(fault_of, records), strict=True):
            on_image()
            if fault is not None:
                suspicions.append(Suspicion("invalid image file", record, detail=fault))
    return suspicions


def read_headers(records: Sequence[ImageRecord]) -> list[HeaderSize | ImageError]:
    """Return the size of each image from its file's header.

    If the header cannot be read, or the size is outside the limits of `check_size`, the image's
    entry in the result is the error.
    """

    def read(record: ImageRecord) -> HeaderSize | ImageError:
        try:
            header = read_header_size(record.path)
            check_size(*header.upright, MAX_PIXELS)
            return header
        except ImageError as error:
            return error

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(read, records))


def misfit_files(
    records: Sequence[ImageRecord], headers: Sequence[HeaderSize | ImageError]
) -> list[Suspicion]:
    """Find image files whose header is unreadable, or states another size than the annotations.

    `headers` is the result of `read_headers`: the size of each image, or the error of its header.
    """
    misfits = []
    for record, header in zip(records, headers, strict=True):
        if isinstance(header, ImageError):
            misfits.append(Suspicion("invalid image file", record, detail=str(header)))
        elif (record.height, record.width) not in (header.stored, header.upright):
            height, width = header.upright
            fault = f"{height}x{width} pixels, but annotated as {record.height}x{record.width}"
            misfits.append(Suspicion("invalid image file", record, detail=fault))
    return misfits


def rotated_files(
    records: Sequence[ImageRecord], headers: Sequence[HeaderSize | ImageError]
) -> list[Suspicion]:
    """Find image files with an EXIF rotation.

    The reason in each result says whether training applies the rotation. `headers` is the result of
    `read_headers`: the size of each image, or the error of its header.
    """
    rotated = []
    for record, header in zip(records, headers, strict=True):
        if isinstance(header, ImageError) or header.orientation == 1:
            continue
        if header.stored == header.upright:
            rule = "applied unless data.exif_orientation=ignore"
        elif (record.height, record.width) == header.upright:
            rule = "applied, as the annotated size shows"
        else:
            rule = "ignored, as the annotated size shows"
        rotated.append(Suspicion(f"EXIF orientation: {rule}", record))
    return rotated


def unlisted_files(folders: Iterable[Path], listed: Iterable[Path]) -> list[Path]:
    """Return the image files below `folders` that are not in `listed`, sorted by path."""
    # Normalise the paths on both sides, because file names in annotations may contain `..`.
    files = {
        Path(os.path.normpath(os.path.join(parent, name)))
        for folder in folders
        for parent, _, names in os.walk(folder)
        for name in names
        if is_image_file(Path(name))
    }
    return sorted(files.difference(Path(os.path.normpath(path)) for path in listed))


def _equal_files(paths: Iterable[Path]) -> list[list[Path]]:
    """Return groups of two or more files with equal content."""
    groups = [list(paths)]
    # Each key is more expensive than the previous one, but is computed for fewer files.
    for key in (image_file_size, _tail_of, _digest_of):
        groups = [part for group in groups for part in _group_by(group, key) if len(part) > 1]
    return groups


def _group_by(paths: Iterable[Path], key: Callable[[Path], Hashable]) -> Iterable[list[Path]]:
    groups: dict[Hashable, list[Path]] = defaultdict(list)
    for path in paths:
        try:
            groups[key(path)].append(path)
        except (OSError, ImageError):
            # `misfit_files` and `undecodable_files` report unreadable files, pipes and devices.
            continue
    return groups.values()


def _tail_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read()


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()

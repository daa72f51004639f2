"""Image files that look wrong: listed twice, copied, forgotten, or not to be decoded."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...model.images import IMAGE_SUFFIXES, ImageError
from .annotation_checks import Suspicion
from .coco import ImageRecord

_TAIL = 4096


def suspicious_files(records: Sequence[ImageRecord]) -> list[Suspicion]:
    """Files that are listed more than once, and files with the content of another."""
    first_by_path: dict[Path, ImageRecord] = {}
    found = [
        Suspicion("file listed more than once", record)
        for record in records
        if first_by_path.setdefault(record.path, record) is not record
    ]
    for first, *others in _copies(first_by_path):
        found += [
            Suspicion("file with the content of another", first_by_path[path], detail=f"as {first}")
            for path in others
        ]
    return found


def undecodable_files(
    records: Sequence[ImageRecord], on_image: Callable[[], object] = lambda: None
) -> list[Suspicion]:
    """Files that cannot be decoded, or are of another size than annotated.

    Args:
        records: the images.
        on_image: called after every image.
    """
    from .reading import read_image

    def fault_of(record: ImageRecord) -> str | None:
        try:
            read_image(record)
        except ImageError as error:
            return str(error).removeprefix(f"{record.path}: ")
        return None

    found = []
    # Threads will do, for decoders let go of the interpreter.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for record, fault in zip(records, pool.map(fault_of, records), strict=True):
            on_image()
            if fault is not None:
                found.append(Suspicion("file that cannot be used", record, detail=fault))
    return found


def unlisted_files(folders: Iterable[Path], listed: Iterable[Path]) -> list[Path]:
    """Image files at any depth of the folders that no annotation file mentions, sorted."""
    found = {
        Path(parent, name)
        for folder in folders
        for parent, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix.lower() in IMAGE_SUFFIXES
    }
    return sorted(found.difference(listed))


def _copies(paths: Iterable[Path]) -> list[list[Path]]:
    """Groups of files of the same content."""
    groups = [list(paths)]
    # Each look costs more than the one before, and is taken at fewer files: those of one size, and
    # of these the few of one end.
    for look in (_size_of, _tail_of, _digest_of):
        groups = [part for group in groups for part in _parts_of(group, look) if len(part) > 1]
    return groups


def _parts_of(paths: Iterable[Path], look: Callable[[Path], Hashable]) -> Iterable[list[Path]]:
    parts: dict[Hashable, list[Path]] = defaultdict(list)
    for path in paths:
        try:
            parts[look(path)].append(path)
        except OSError:  # decoding will say so
            continue
    return parts.values()


def _size_of(path: Path) -> int:
    return path.stat().st_size


def _tail_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return file.read()


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()

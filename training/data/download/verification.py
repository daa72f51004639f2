"""Verify downloaded COCO archives and their extracted folders."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....model.download.checksums import Checksum
from ....model.download.progress import ByteProgress
from ....model.image_decoding import decode_image
from ....model.image_limits import ImageError
from ....model.plurals import counted
from ....model.shell_commands import shell_path
from ..coco.dataset import DataError
from .coco_archives import CocoArchive, Edition, Part, annotations_in
from .extraction import missing_members

# Maximum number of file names in a message.
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class VerificationResult:
    """Result of checking one archive or one extracted folder."""

    # Archive or folder that was checked.
    path: Path
    # Description of the damage. None: the archive or folder is intact.
    fault: str | None
    # Shell command that repairs the archive or folder.
    remedy: str


def verify_part(
    edition: Edition,
    part: Part,
    archive: CocoArchive,
    root: Path,
    *,
    decode: bool,
    on_progress: ByteProgress,
) -> list[VerificationResult]:
    """Check a part of COCO, such as `train`: its archive and its extracted folder, if they exist.

    The archive must have the size and MD5 of the published archive. The files in the folder must
    have the CRCs that the archive states. If the archive is missing or damaged, the folder is
    checked without CRCs: all annotated images must exist and not be empty, and annotation files
    must be complete.

    Args:
        edition: Edition of COCO, such as `coco2017`.
        part: Part of the edition.
        archive: Published archive of the part.
        root: Folder of the data set.
        decode: Also decode images that cannot be compared with an archive.
        on_progress: Called repeatedly with a step's name, processed bytes and total bytes.

    Returns:
        One result for the archive and one for the folder, if they exist. If neither exists, one
        result with the fault "does not exist".
    """
    path, folder = root / archive.name, root / archive.folder
    download = _download_command(edition, part, root)
    results, archive_is_intact = [], False
    if path.exists():
        fault = _archive_fault(path, archive, on_progress)
        archive_is_intact = fault is None
        remedy = f"rm {shell_path(path)} && {download}"
        results.append(VerificationResult(path, fault, remedy))
    if folder.exists() and archive_is_intact:
        fault = _difference_fault(path, folder, on_progress)
        extract = f"maskrcnn data extract {edition} {shell_path(root)} --part {part}"
        results.append(VerificationResult(folder, fault, extract))
    elif folder.exists() and part == "annotations":
        results.append(VerificationResult(folder, _annotations_fault(edition, root), download))
    elif folder.exists():
        try:
            sizes = _image_sizes(annotations_in(root, folder.name))
        except DataError as error:
            remedy = _download_command(edition, "annotations", root)
            results.append(VerificationResult(folder, f"cannot be checked: {error}", remedy))
        else:
            fault = _images_fault(folder, sizes, decode, on_progress)
            results.append(VerificationResult(folder, fault, download))
    return results or [VerificationResult(folder, "does not exist", download)]


def _download_command(edition: Edition, part: Part, root: Path) -> str:
    return f"maskrcnn data download {edition} {shell_path(root)} --part {part} --extract"


def _archive_fault(path: Path, archive: CocoArchive, on_progress: ByteProgress) -> str | None:
    size = path.stat().st_size
    if archive.size is not None and size != archive.size:
        return f"{size} bytes; the published file has {archive.size} bytes"
    expected = Checksum("md5", archive.md5)
    actual = expected.of(path, f"checking {path.name}", on_progress)
    return None if actual == expected else f"{actual}; the published file has MD5 {archive.md5}"


def _difference_fault(archive: Path, folder: Path, on_progress: ByteProgress) -> str | None:
    try:
        members = missing_members(archive, folder, on_progress)
    except DataError as error:
        return str(error)
    return _fault_of_files("missing or altered", members)


def _annotations_fault(edition: Edition, root: Path) -> str | None:
    year = edition.removeprefix("coco")
    for split in ("train", "val"):
        try:
            _image_sizes(annotations_in(root, f"{split}{year}"))
        except DataError as error:
            return str(error)
    return None


def _images_fault(
    folder: Path, sizes: Mapping[str, tuple[int, int]], decode: bool, on_progress: ByteProgress
) -> str | None:
    lengths = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    missing = [name for name in sizes if not lengths.get(name)]
    if missing or not decode:
        return _fault_of_files("missing or empty", missing)
    broken, done, total = [], 0, sum(lengths[name] for name in sizes)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        outcomes = pool.map(lambda name: _is_valid_image(folder / name, sizes[name]), sizes)
        for name, is_valid in zip(sizes, outcomes, strict=True):
            broken += [] if is_valid else [name]
            done += lengths[name]
            on_progress(f"decoding {folder.name}", done, total)
    return _fault_of_files("unreadable or of another size than annotated", broken)


def _image_sizes(annotations: Path) -> Mapping[str, tuple[int, int]]:
    """Read the height and width of each image, by file name, from a COCO annotation file.

    Raises:
        DataError: The file cannot be read, or is not a complete COCO file.
    """
    try:
        content: dict[str, list[dict[str, Any]]] = json.loads(annotations.read_bytes())
        sizes = {i["file_name"]: (i["height"], i["width"]) for i in content["images"]}
        is_complete = bool(sizes and content["annotations"] and content["categories"])
    except OSError as error:
        raise DataError(f"cannot read {annotations}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        is_complete = False
    if not is_complete:
        raise DataError(
            f"{annotations} is damaged, or lacks images, annotations or categories; delete it and "
            "download it again"
        )
    return sizes


def _is_valid_image(image: Path, size: tuple[int, int]) -> bool:
    try:
        return decode_image(image.read_bytes(), apply_orientation=False).shape[:2] == size
    except (ImageError, OSError):
        return False


def _fault_of_files(fault: str, names: Sequence[str]) -> str | None:
    if not names:
        return None
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return f"{counted(len(names), 'file')} {fault}: {', '.join(names[:_NAMES_SHOWN])}{more}"

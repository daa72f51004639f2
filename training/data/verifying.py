"""Whether what lies in the folder of COCO is what COCO published."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...model.images import ImageError, decode_image
from .coco import DataError
from .coco_files import CocoPart, Edition, Part, annotations_in
from .disk import ByteProgress, md5_of, no_progress
from .extracting import missing_members

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """What was found where an archive or its extracted folder should be."""

    path: Path
    fault: str | None
    """What is wrong; none, it is right."""
    remedy: str
    """The command that mends it."""


def verify_part(
    edition: Edition,
    name: Part,
    part: CocoPart,
    root: Path,
    *,
    decode: bool = False,
    on_progress: ByteProgress = no_progress,
) -> list[Finding]:
    """Check the archive of a part and its extracted folder, whichever are there.

    An archive is right if its checksum is. A folder is compared with a right archive by CRC, and
    without one with the annotations: every image is there and not empty.

    Args:
        edition: of COCO.
        name: of the part.
        part: what it consists of.
        root: folder of the data set.
        decode: decode the images for which no archive vouches.
        on_progress: see `ByteProgress`.
    """
    archive, folder = part.archive_in(root), part.folder_in(root)
    download = _download_of(edition, name, root)
    findings, vouched = [], False
    if archive.exists():
        fault = _archive_fault(archive, part, on_progress)
        vouched = fault is None
        findings.append(Finding(archive, fault, f"rm {shlex.quote(str(archive))} && {download}"))
    if folder.exists() and vouched:
        fault = _difference_from(archive, folder, on_progress)
        extract = ["maskrcnn", "data", "extract", edition, str(root), "--part", name]
        findings.append(Finding(folder, fault, shlex.join(extract)))
    elif folder.exists() and name == "annotations":
        findings.append(Finding(folder, _annotations_fault(edition, root), download))
    elif folder.exists():
        try:
            sizes = _sizes_from(annotations_in(root, part.folder))
        except DataError as error:
            annotations = _download_of(edition, "annotations", root)
            findings.append(Finding(folder, f"cannot be checked: {error}", annotations))
        else:
            fault = _images_fault(folder, sizes, decode, on_progress)
            findings.append(Finding(folder, fault, download))
    return findings or [Finding(folder, "not there", download)]


def _download_of(edition: Edition, name: Part, root: Path) -> str:
    arguments = [edition, str(root), "--part", name, "--extract"]
    return shlex.join(["maskrcnn", "data", "download", *arguments])


def _archive_fault(archive: Path, part: CocoPart, on_progress: ByteProgress) -> str | None:
    size = archive.stat().st_size
    if part.size is not None and size != part.size:
        return f"{size} bytes, where {part.size} were published"
    found = md5_of(archive, f"checking {archive.name}", on_progress)
    return None if found == part.md5 else f"MD5 {found}, where {part.md5} was published"


def _difference_from(archive: Path, folder: Path, on_progress: ByteProgress) -> str | None:
    try:
        members = missing_members(archive, folder, on_progress)
    except DataError as error:
        return str(error)
    return _sentence("missing or altered", members)


def _annotations_fault(edition: Edition, root: Path) -> str | None:
    year = edition.removeprefix("coco")
    for split in ("train", "val"):
        try:
            _sizes_from(annotations_in(root, f"{split}{year}"))
        except DataError as error:
            return str(error)
    return None


def _images_fault(
    folder: Path, sizes: Mapping[str, tuple[int, int]], decode: bool, on_progress: ByteProgress
) -> str | None:
    lengths = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    wanting = [name for name in sizes if not lengths.get(name)]
    if wanting or not decode:
        return _sentence("missing or empty", wanting)
    broken, done, total = [], 0, sum(lengths[name] for name in sizes)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sound = pool.map(lambda name: _is_sound(folder / name, sizes[name]), sizes)
        for name, is_sound in zip(sizes, sound, strict=True):
            broken += [] if is_sound else [name]
            done += lengths[name]
            on_progress(f"decoding {folder.name}", done, total)
    return _sentence("unreadable or of another size than annotated", broken)


def _sizes_from(annotations: Path) -> Mapping[str, tuple[int, int]]:
    """Height and width of the images by file name.

    Raises:
        DataError: the file is not there, or not in COCO format.
    """
    try:
        content: dict[str, list[dict[str, Any]]] = json.loads(annotations.read_bytes())
        sizes = {i["file_name"]: (i["height"], i["width"]) for i in content["images"]}
        whole = bool(sizes and content["annotations"] and content["categories"])
    except OSError as error:
        raise DataError(f"{annotations}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise DataError(f"{annotations} is not a whole COCO instances file")
    return sizes


def _is_sound(image: Path, size: tuple[int, int]) -> bool:
    try:
        return decode_image(image.read_bytes(), apply_orientation=False).shape[:2] == size
    except (ImageError, OSError):
        return False


def _sentence(fault: str, names: Sequence[str]) -> str | None:
    if not names:
        return None
    files = "1 file" if len(names) == 1 else f"{len(names)} files"
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return f"{files} {fault}: {', '.join(names[:_NAMES_SHOWN])}{more}"

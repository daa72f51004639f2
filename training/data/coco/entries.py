"""Validate and index the images and annotations that a COCO file lists."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ....model.bundle.spec import MAX_PIXELS
from ....model.image_limits import ImageError
from ..image_sizes import read_header_size
from .annotations import Instance, InvalidAnnotationError, instance_from_annotation
from .image_paths import find_image_paths
from .numbers import id_from, integer_from

# Names of invalid or repaired entries of a COCO file. The keys are the reasons, such as
# "images: file missing".
Findings = dict[str, list[str]]


class ImageEntry(NamedTuple):
    """Valid entry of the list `images` in a COCO file."""

    # The id in the COCO file if it is an integer, else a new integer.
    id: int
    path: Path
    # Size in pixels.
    height: int
    width: int


class ImageIndex(NamedTuple):
    """Index of the images that a COCO file lists."""

    # Valid entries by their id in the COCO file.
    valid: Mapping[int | str, ImageEntry]
    # Ids of all entries, valid or not, in the COCO file.
    listed: frozenset[int | str]
    # Ids of valid entries that are strings in the COCO file, by `ImageEntry.id`.
    strings: Mapping[int, str]


def index_images(
    entries: list[dict[str, Any]], folder: Path, faults: Findings, repairs: Findings
) -> ImageIndex:
    """Index the valid entries of the list `images` of a COCO file.

    The result also contains the ids of all entries, valid or not.

    Args:
        entries: Entries of the list.
        folder: Image folder.
        faults: Mapping to update: for each reason, the file names of invalid entries. An entry
            without a file name is listed by its id.
        repairs: Mapping to update: for each reason, the file names of entries that get a new id,
            whose file is found at another path, or whose file an earlier entry also has.
    """
    names = {name for entry in entries if isinstance(name := entry.get("file_name"), str)}
    found = find_image_paths(folder, names)
    keys = [id_from(entry.get("id")) for entry in entries]
    ids = _integer_ids(keys)
    valid: dict[int | str, ImageEntry] = {}
    strings: dict[int, str] = {}
    used: set[Path] = set()
    for key, entry in zip(keys, entries, strict=True):
        name = entry.get("file_name")
        if key is None or not isinstance(name, str):
            faults["images: no id or no file name"].append(str(name or key))
        elif key in valid:
            faults["images: duplicate id"].append(name)
        elif name in found.ambiguous:
            faults[
                "images: file not at its listed path, and several files or entries have its name"
            ].append(name)
        elif name in found.other_case:
            faults["images: file missing, but another file name differs only in case"].append(name)
        elif (path := found.paths.get(name)) is None:
            faults["images: file missing"].append(name)
        elif (size := _size_of(entry, path)) is None:
            faults["images: no height and width, neither in the entry nor in the file"].append(name)
        elif math.prod(size) > MAX_PIXELS:
            faults[f"images: more than {MAX_PIXELS} pixels"].append(name)
        else:
            valid[key] = ImageEntry(ids[key], path, *size)
            if isinstance(entry["id"], str):
                strings[ids[key]] = entry["id"]
            if isinstance(key, str):
                repairs["images: id is not an integer; replaced by a number"].append(name)
            if name in found.moved:
                repairs["images: file in another subfolder than listed"].append(name)
            if path in used:
                repairs[
                    "images: file listed more than once; each entry is used as an image"
                ].append(name)
            used.add(path)
    return ImageIndex(valid, frozenset(key for key in keys if key is not None), strings)


def index_annotations(
    entries: list[dict[str, Any]],
    images: ImageIndex,
    labels: Mapping[int, int],
    faults: Findings,
    repairs: Findings,
) -> Mapping[int, list[Instance]]:
    """Validate the entries of the list `annotations` of a COCO file. Return instances by image id.

    Args:
        entries: Entries of the list.
        images: Result of `index_images`. Annotations of invalid images are ignored.
        labels: Label (1 is the first class) by category id.
        faults: Mapping to update: for each reason, the ids of invalid annotations.
        repairs: Mapping to update: for each reason, the ids of annotations that were repaired or
            have the id of another annotation. All of them are used.
    """
    instances: dict[int, list[Instance]] = defaultdict(list)
    seen: set[str] = set()
    for entry in entries:
        key, name = id_from(entry.get("image_id")), str(entry.get("id", "without id"))
        if key not in images.listed:
            faults["annotations: unknown image"].append(name)
            continue
        image = images.valid.get(key)
        if image is None:
            continue
        try:
            instance, reasons = instance_from_annotation(entry, image.height, image.width, labels)
        except InvalidAnnotationError as error:
            faults[f"annotations: {error}"].append(name)
            continue
        instances[image.id].append(instance)
        for reason in reasons:
            repairs[f"annotations: {reason}"].append(name)
        if "id" in entry and name in seen:
            repairs["annotations: duplicate id; all are used"].append(name)
        seen.add(name)
    return instances


def _integer_ids(keys: Sequence[int | str | None]) -> dict[int | str, int]:
    """Map each id to an integer: an integer to itself, a string to an unused positive integer.

    None, which stands for a missing or invalid id, is left out.
    """
    integers = [key for key in keys if isinstance(key, int)]
    strings = dict.fromkeys(key for key in keys if isinstance(key, str))
    free = max((0, *integers)) + 1
    return {key: key for key in integers} | {s: n for n, s in enumerate(strings, start=free)}


def _size_of(entry: Mapping[str, Any], path: Path) -> tuple[int, int] | None:
    """Return height and width from an entry or, if they are missing, from the image file's header.

    None: the entry has no size, and the header cannot be read.
    """
    height, width = integer_from(entry.get("height")), integer_from(entry.get("width"))
    if height and width and min(height, width) > 0:
        return height, width
    try:
        # Annotations refer to the image as annotation tools show it: after its EXIF rotation.
        return read_header_size(path).upright
    except ImageError:
        return None

"""Find the splits of a data set folder: pairs of an annotation file and an image folder."""

import json
import logging
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from ...config import DatasetConfig
from .dataset import DataError
from .image_paths import existing_path

logger = logging.getLogger(__name__)

_PREFIX = "instances_"
# Standard name of a split by synonym.
_SYNONYMS = {"valid": "val", "validation": "val", "training": "train", "testing": "test"}
_STANDARD = frozenset({"train", "val", "test"})
# Number of listed images that are looked up in a folder to recognise a split's image folder.
_LOOKUPS = 5
_FILE_NAME = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.){1,1000}")')


def find_splits(folder: Path) -> dict[str, DatasetConfig]:
    """Find the annotation files `annotations/[instances_]<split>.json` and their image folders.

    The image folder of a split is the first folder in this list that contains any of the first
    five images of the split:

    1. Subfolders of `folder` and of `folder/images` that are named after the split, longest name
       first. The split's name must end with the subfolder's name (`val2014/` for `minival2014`), or
       the names must be synonyms (`valid/` for `val`).
    2. `folder/images`, unless it has a subfolder that is named after another split.
    3. `folder`.
    4. All other subfolders of `folder` and of `folder/images`. A subfolder that is named after
       another split is excluded if that split also lists any of the five file names. If several of
       the remaining subfolders contain any of the five images, `DataError` is raised, because some
       of them may hold copies of the images, for example with detections drawn on them.

    If all of these folders lack the five images, the first folder of step 1 is chosen, or else the
    folder of step 2. Splits without an image folder are skipped with a warning.

    Raises:
        DataError: There is no annotation file, no split has an image folder, or step 4 finds
            several folders for a split.
    """
    files = annotation_files(folder)
    if not files:
        raise DataError(
            f"{folder} has no annotations/*.json; pass a folder that contains such files"
        )
    for file in sorted((folder / "annotations").glob("[!._]*.json")):
        # Names such as `captions_val2017.json` are those of other tasks.
        prefixed = file.with_name(f"{_PREFIX}{file.name}")
        if file not in files and prefixed not in files and "_" not in file.stem:
            logger.warning(
                "%s is ignored, because other files are named %s*.json; to use it, rename it to %s",
                file,
                _PREFIX,
                prefixed.name,
            )
    return pair_splits(folder, {file.stem.removeprefix(_PREFIX): file for file in files})


def pair_splits(folder: Path, by_split: Mapping[str, Path]) -> dict[str, DatasetConfig]:
    """Pair each split's annotation file with its image folder in the data set's folder.

    `by_split` maps the name of each split to its annotation file. Splits without an image folder
    are skipped with a warning.

    Raises:
        DataError: No split has an image folder, or a split could have several.
    """
    folders = {
        split: image_folder(folder, split, file, by_split) for split, file in by_split.items()
    }
    if not any(folders.values()):
        names = ", ".join(f"{name}/" for name in ("images", *by_split))
        raise DataError(
            f"{folder} has annotations but none of the image folders {names}; move or link the "
            "images into one of these folders, or pass another folder"
        )
    splits = {}
    for split, images in folders.items():
        if images is None:
            logger.warning(
                "%s: image folder %s/ not found; the split is left out", by_split[split], split
            )
        else:
            splits[split] = DatasetConfig(images=images, annotations=by_split[split])
    return splits


def splits_named(names: Iterable[str], word: str) -> list[str]:
    """Return the split names that contain `word`, such as "train". Letter case is ignored.

    A name that equals `word` comes first. The other names are sorted by length.
    """
    matches = [name for name in names if word in name.lower()]
    return sorted(matches, key=lambda name: (name.lower() != word, len(name)))


def is_split_name(name: str) -> bool:
    """Return whether a name is that of a split, such as train, valid or test2017."""
    base = name.rstrip("0123456789")
    return _SYNONYMS.get(base, base) in _STANDARD


def annotation_files(folder: Path) -> list[Path]:
    """Return the files `annotations/instances_*.json`, or else all `annotations/*.json`."""
    place = folder / "annotations"
    # Not `glob`, which ignores folders that cannot be read.
    names = os.listdir(place) if place.is_dir() else []
    files = sorted(place / n for n in names if n.endswith(".json") and not n.startswith("."))
    # If there are files `instances_*.json`, ignore all others, because COCO also has files with
    # captions and keypoints in this folder.
    return [file for file in files if file.name.startswith(_PREFIX)] or files


def image_folder(folder: Path, split: str, file: Path, by_split: Mapping[str, Path]) -> Path | None:
    """Find the image folder of a split by the rules of `find_splits`. None: there is none.

    Args:
        folder: Folder of the data set.
        split: Name of the split.
        file: Annotation file of the split.
        by_split: Annotation files of all splits.

    Raises:
        DataError: Several folders that are not named after the split contain files with the names
            of its images.
    """
    common = folder / "images"
    places = [*_subfolders(folder), *_subfolders(common)]
    named = [place for place in places if _is_named(place, split)]
    named.sort(key=lambda place: len(place.name), reverse=True)
    others = {other: own for other, own in by_split.items() if other != split}
    # Use `images/` itself only if other splits have no folders in it. Otherwise, the images of
    # several splits may have the same names.
    if common.is_dir() and not any(_is_named(p, o) for p in _subfolders(common) for o in others):
        named.append(common)
    names = list(islice(_file_names(file), _LOOKUPS))

    def has_images(place: Path) -> bool:
        return any(existing_path(place, name) for name in names)

    for place in (*named, folder):
        if has_images(place):
            return place
    # The keys are resolved paths, because several links may lead to one folder.
    found = {
        place.resolve(): place
        for place in places
        if has_images(place) and not _lists_other_images(place, names, others)
    }
    if len(found) > 1:
        first, second, *_ = found.values()
        raise DataError(
            f"{first} and {second} both contain files with the names of the images of {file}; "
            f"rename the folder that belongs to {file} to {folder / split}"
        )
    return next(iter([*found.values(), *named]), None)


def _is_named(place: Path, split: str) -> bool:
    """Return whether a folder is named after a split, ignoring the case of letters.

    The split's name must end with the folder's name (`val2014/` for `minival2014`), or the names
    must be synonyms (`valid/` for `val`).
    """
    name, split = place.name.lower(), split.lower()
    return split.endswith(name) or _SYNONYMS.get(name, name) == _SYNONYMS.get(split, split)


def _lists_other_images(place: Path, names: Sequence[str], others: Mapping[str, Path]) -> bool:
    """Return whether an image folder probably belongs to another split.

    The result is True if the folder is named after another split, and the other split's annotation
    file lists any of `names`.

    Args:
        place: The folder.
        names: Image file names of the split for which the folder is a candidate.
        others: Annotation files of the other splits, by name of the split.
    """
    # In a folder that is named after the other split, a file whose name both splits list is
    # probably an image of the other split.
    owners = (file for split, file in others.items() if _is_named(place, split))
    return any(not set(names).isdisjoint(_file_names(file)) for file in owners)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _file_names(file: Path) -> Iterator[str]:
    """Yield the image file names that an annotation file lists, without parsing the whole file."""
    if not file.stat().st_size:
        return
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as content:
        for match in _FILE_NAME.finditer(content):
            try:
                yield json.loads(match[1]).replace("\\", "/")
            except ValueError:
                continue

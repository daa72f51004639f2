"""Find the image and label files of a data set in YOLO's format."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from ....model.image_files import IMAGE_FILE_SUFFIXES, is_image_file
from ..coco.entries import Findings
from ..folders import files_below

# Suffixes of image files. Files in unsupported formats, such as .gif, are reported as unusable.
_SUFFIXES = IMAGE_FILE_SUFFIXES | {".gif", ".heic"}


class FoundImages(NamedTuple):
    """Image files of a split, and the names of missing images by reason."""

    # Absolute paths in ascending order.
    files: tuple[Path, ...]
    faults: Findings


def find_images(folder: Path, root: str, value: Any) -> FoundImages:
    """Find the image files of a split.

    Args:
        folder: Folder of the YAML file.
        root: Value of the key `path` in the YAML file; empty if the file does not have this key.
        value: Value of the split's key in the YAML file: a folder, a text file that lists images,
            or a list of these.
    """
    images: set[Path] = set()
    faults: Findings = defaultdict(list)
    for text in map(str, value if isinstance(value, list) else [value]):
        path = _resolve(folder, root, text)
        if path is not None and path.is_file():
            for line in filter(None, map(str.strip, _lines_of(path))):
                image = _resolve(path.parent, str(folder.absolute()), line)
                if image is not None and image.is_file():
                    images.add(image)
                else:
                    faults["images: file missing"].append(line)
            continue
        files = _image_files(files_below(path)) if path is not None else []
        images.update(files)
        if not files:
            faults["images: folder or list missing or empty"].append(text)
    return FoundImages(tuple(sorted(images)), faults)


def labels_without_image(label_files: Mapping[Path, Path]) -> list[Path]:
    """Return the label files for which no image with the same stem exists, sorted by path.

    Args:
        label_files: Label file by image file, for the images that have one. Only the folders of
            these label files and images are searched.
    """
    image_folders: dict[Path, set[Path]] = defaultdict(set)
    for image, labels in label_files.items():
        image_folders[labels.parent].add(image.parent)
    alone = []
    for folder, others in image_folders.items():
        stems = {image.stem for other in others for image in _image_files(other.iterdir())}
        alone += [p for p in folder.glob("*.txt") if p.stem not in stems and _has_labels(p)]
    return sorted(alone)


def _image_files(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if is_image_file(path, _SUFFIXES)]


def _lines_of(path: Path) -> list[str]:
    # Editors on Windows write a byte order mark.
    return path.read_text("utf-8-sig", errors="replace").splitlines()


def _has_labels(path: Path) -> bool:
    """Return whether each line of a text file is a class number and at least four coordinates."""
    rows = [line.split() for line in _lines_of(path) if line.strip()]
    try:
        return all(len(row) > 4 and isfinite(sum(map(float, row))) for row in rows)
    except ValueError:
        return False


def _resolve(folder: Path, root: str, text: str) -> Path | None:
    """Return the first existing path to which `text` may refer. None: there is none.

    Args:
        folder: Folder of the file that contains `text`.
        root: Another possible base folder of `text`. It is absolute, or relative to `folder`.
        text: Path of an image, of a folder, or of a text file that lists images. It is absolute, or
            relative to `folder` or `root`.
    """
    text = text.replace("\\", "/")
    parts = [part for part in text.split("/") if part not in ("", ".", "..")]
    candidates = [folder / root / text, folder / text]
    # Programs write paths relative to other folders, such as `../train/images`, and absolute paths
    # of the machine that exported the data. Therefore also try the path without its first
    # one, two, ... components. Exclude `images` alone, which could be the folder of another split.
    ends = (parts[start:] for start in range(len(parts)))
    candidates += [folder.joinpath(*end) for end in ends if end != ["images"] or len(parts) == 1]
    # Not `Path.exists`, which raises an error for a name that is too long.
    return next((Path(os.path.abspath(p)) for p in candidates if os.path.exists(p)), None)


def label_paths(image: Path) -> list[Path]:
    """Return the possible paths of an image's label file. The most common path comes first."""
    file = image.with_suffix(".txt")
    parts = file.parts[:-1]
    paths = [
        Path(*parts[:index], "labels", *parts[index + 1 :], file.name)
        for index in reversed(range(len(parts)))
        if parts[index].lower() == "images"
    ]
    return [*paths, file, image.parent / "labels" / file.name]

"""Find the image and label files of a data set in YOLO's format."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....model.image_files import IMAGE_FILE_SUFFIXES

# Suffixes of image files. Those in unsupported formats, such as .gif, are reported as unusable.
_SUFFIXES = IMAGE_FILE_SUFFIXES | {".gif", ".heic"}


def images_of(folder: Path, root: str, value: Any) -> Iterator[Path]:
    """Yield the absolute paths of the image files of a split.

    Args:
        folder: Folder of the YAML file.
        root: Its key `path`. The empty string: it has none.
        value: A folder, a text file that lists images, or a list of these.
    """
    for text in value if isinstance(value, list) else [value]:
        path = _resolve(folder, root, str(text))
        if path is None:
            continue
        if path.is_dir():
            yield from (p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES)
        else:
            lines = (line.strip() for line in path.read_text(errors="replace").splitlines())
            listed = (_resolve(path.parent, str(folder.absolute()), line) for line in lines if line)
            yield from (p for p in listed if p is not None and p.is_file())


def _resolve(folder: Path, root: str, text: str) -> Path | None:
    """Return the first existing path to which `text` may refer. None: there is none."""
    text = text.replace("\\", "/")
    parts = [part for part in text.split("/") if part not in ("", ".", "..")]
    candidates = [folder / root / text, folder / text]
    # Programs write paths relative to other folders, such as `../train/images`, and absolute paths
    # of the machine that exported the data. The name `images` alone could refer to another split.
    ends = (parts[start:] for start in range(len(parts)))
    candidates += [folder.joinpath(*end) for end in ends if end != ["images"] or len(parts) == 1]
    # Not `Path.exists`, which raises an error for a name that is too long.
    return next((Path(os.path.abspath(p)) for p in candidates if os.path.exists(p)), None)


def label_file(image: Path) -> Path | None:
    """Return the existing label file of an image. None: there is none."""
    file = image.with_suffix(".txt")
    parts = file.parts[:-1]
    candidates = [
        Path(*parts[:index], "labels", *parts[index + 1 :], file.name)
        for index in reversed(range(len(parts)))
        if parts[index] == "images"
    ]
    candidates += [file, image.parent / "labels" / file.name]
    return next((path for path in candidates if path.is_file()), None)


def relative_name(path: Path, folder: Path) -> str:
    """Return the path of a file relative to a folder, with slashes, for messages."""
    return Path(os.path.relpath(path, folder)).as_posix()

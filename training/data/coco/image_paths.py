"""Find the image files that a COCO file lists."""

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from ..folders import files_below


class ImagePaths(NamedTuple):
    """Paths of the image files that a COCO file lists, and names of misplaced or missing files."""

    # By listed name.
    paths: Mapping[str, Path]
    # Listed names of files that are in another subfolder than listed.
    moved: frozenset[str]
    # Listed names of missing files for which the right file is unclear: several files, or several
    # entries of the list, have the same last path component.
    ambiguous: frozenset[str]
    # Listed names of missing files for which a file exists whose name differs only in case.
    other_case: frozenset[str]


def find_image_paths(folder: Path, names: Collection[str]) -> ImagePaths:
    """Find the image files that a COCO file lists, in an image folder.

    If a file is not at its listed path, the folder is searched at any depth for a file with the
    same name. This file is used only if no other file in the folder, and no other path in the COCO
    file, has the same name.

    Args:
        folder: Image folder.
        names: Values of `file_name` in the COCO file, without duplicates.
    """
    # One listing instead of a `stat` per file saves minutes on a network file system.
    present = {entry.name for entry in os.scandir(folder)}
    paths = {name: path for name in names if (path := existing_path(folder, name, present))}
    missing = {name: _last_part(name) for name in names if name not in paths}
    if not missing:
        return ImagePaths(paths, frozenset(), frozenset(), frozenset())
    found = _files_named(folder, {*missing.values()})
    folded = {name.casefold() for name in found}
    uses = Counter(map(_last_part, names))
    # Use a file only if exactly one entry has its name. If there are several such entries, such as
    # `a/0.jpg` and `b/0.jpg`, the file may be the image of any of them.
    moved = {
        n: found[last][0] for n, last in missing.items() if len(found[last]) == uses[last] == 1
    }
    ambiguous = frozenset(n for n, last in missing.items() if found[last] and n not in moved)
    other_case = frozenset(
        n for n, last in missing.items() if not found[last] and last.casefold() in folded
    )
    return ImagePaths(paths | moved, frozenset(moved), ambiguous, other_case)


def existing_path(folder: Path, name: str, present: Collection[str] = ()) -> Path | None:
    """Return the path of an image file that an annotation file names. None: the file is missing.

    `name` is the listed path, relative to `folder`. `present` contains names of files and folders
    directly in `folder`. If `name` is among them, the disk is not accessed.
    """
    if name in present:  # first, because a data set can list 100,000 names
        return folder / name
    # Programs on Windows write backslashes, so try the name with slashes too. Programs on macOS
    # write `é` as two code points, so try both forms of accented letters.
    slashed = name.replace("\\", "/")
    forms = (unicodedata.normalize(form, slashed) for form in ("NFC", "NFD"))
    for candidate in dict.fromkeys((name, slashed, *forms)):
        # Not `Path.is_file`, which raises an error for a name that is too long.
        if candidate in present or os.path.isfile(folder / candidate):
            return folder / candidate
    return None


def _last_part(name: str) -> str:
    """Return the last component of a path, with each accented letter as one code point."""
    return unicodedata.normalize("NFC", name.replace("\\", "/").rpartition("/")[2])


def _files_named(folder: Path, names: set[str]) -> defaultdict[str, list[Path]]:
    """Find files with the given names in a folder, at any depth. Ignore the case of letters.

    The keys of the result are the actual file names, with each accented letter as one code point.
    Each value lists the paths of the files with this name.
    """
    found = defaultdict(list)
    folded = {name.casefold() for name in names}
    for path in files_below(folder):
        name = unicodedata.normalize("NFC", path.name)
        if name.casefold() in folded:
            found[name].append(path)
    return found

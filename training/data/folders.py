"""Files in a folder and its subfolders, and their paths relative to the folder."""

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder, at any depth. Symbolic links to folders are followed.

    If several paths lead to the same folder, its files are yielded only once.
    """
    roots, seen = [folder], set[str]()
    for root in roots:
        # Links are followed after all other folders, so that paths without links are preferred.
        for parent, subfolders, names in os.walk(root):
            if (real := os.path.realpath(parent)) in seen:
                subfolders.clear()
                continue
            seen.add(real)
            paths = (Path(parent, name) for name in subfolders)
            roots += [path for path in paths if path.is_symlink()]
            yield from (Path(parent, name) for name in names)


def relative_name(path: Path, folder: Path) -> str:
    """Return the path of a file relative to a folder, with slashes."""
    return Path(os.path.relpath(path, folder)).as_posix()

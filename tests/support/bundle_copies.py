"""Copies of a bundle, in which a test may replace or remove files."""

from pathlib import Path


def linked_copy(bundle: Path, path: Path) -> Path:
    """Create a folder of symbolic links to the files of a bundle. Return the folder's path."""
    path.mkdir()
    for file in bundle.iterdir():
        (path / file.name).symlink_to(file)
    return path

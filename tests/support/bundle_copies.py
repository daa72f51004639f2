"""Copies of the tiny bundle that a test may change."""

from pathlib import Path


def linked_copy(bundle: Path, path: Path) -> Path:
    """Create a folder of links to the files of a bundle. Return its path."""
    path.mkdir()
    for file in bundle.iterdir():
        (path / file.name).symlink_to(file)
    return path

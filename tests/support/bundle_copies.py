"""Copies of the tiny bundle: to be changed by a test, or smaller for tests that start servers."""

from pathlib import Path

import pytest
from shared_exports import made_once

from maskrcnn_trt.model.bundle.manifest import read_manifest, write_manifest


def linked_copy(bundle: Path, path: Path) -> Path:
    """Create a folder of links to the files of a bundle. Return its path."""
    path.mkdir()
    for file in bundle.iterdir():
        (path / file.name).symlink_to(file)
    return path


@pytest.fixture(scope="session", name="bundle")
def one_bucket_bundle(bundle: Path, shared_folder: Path) -> Path:
    """The bundle with its first shape bucket only, which a worker process loads faster.

    It replaces the bundle in the folders whose `conftest.py` imports it.
    """

    def write(path: Path) -> None:
        folder, manifest = linked_copy(bundle, path.with_suffix(".partial")), read_manifest(bundle)
        (folder / "manifest.json").unlink()
        write_manifest(folder, manifest.model_copy(update={"artifacts": manifest.artifacts[:1]}))
        folder.rename(path)

    return made_once(shared_folder / "one-bucket-bundle", write)

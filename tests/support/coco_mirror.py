"""Tiny copy of the files on COCO's server: the three zip archives of COCO 2017."""

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

from coco_folder import annotation, write_image

ADDRESSES = {
    "train": "zips/train2017.zip",
    "val": "zips/val2017.zip",
    "annotations": "annotations/annotations_trainval2017.zip",
}
_COUNTS = {"train": 4, "val": 2}
_HEIGHT, _WIDTH = 240, 320


def zip_of(files: dict[str, bytes]) -> bytes:
    """Return an uncompressed zip archive, like those of COCO."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def instances(names: list[str]) -> dict[str, Any]:
    """Return the content of an annotation file with one rectangle per image."""
    size = {"height": _HEIGHT, "width": _WIDTH}
    return {
        "images": [{"id": n, "file_name": name, **size} for n, name in enumerate(names, start=1)],
        "annotations": [annotation(n, n) for n, _ in enumerate(names, start=1)],
        "categories": [{"id": 7, "name": "square"}],
    }


def mirror_files(scratch: Path) -> dict[str, bytes]:
    """Return the archives by their path on the server.

    Args:
        scratch: An existing folder for temporary image files.
    """
    members: dict[str, dict[str, bytes]] = {"annotations": {}}
    for split, count in _COUNTS.items():
        names = [f"{n:012d}.jpg" for n in range(1, count + 1)]
        for name in names:
            write_image(scratch / name, _HEIGHT, _WIDTH, quality=95)
        members[split] = {f"{split}2017/{n}": (scratch / n).read_bytes() for n in names}
        content = json.dumps(instances(names)).encode()
        members["annotations"][f"annotations/instances_{split}2017.json"] = content
        members["annotations"][f"annotations/captions_{split}2017.json"] = b"{}"
    return {ADDRESSES[part]: zip_of(files) for part, files in members.items()}


def write_checksums(path: Path, files: dict[str, bytes]) -> Path:
    """Write the archives' MD5 checksums to a file, in the format of `md5sum`. Return its path."""
    lines = (
        f"{hashlib.md5(content).hexdigest()}  {address.rpartition('/')[2]}\n"
        for address, content in files.items()
    )
    path.write_text("".join(lines))
    return path

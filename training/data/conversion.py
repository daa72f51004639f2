"""Data sets of other formats, written as COCO files that refer to the images where they are."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...model.checkpoint import whole_file
from ...model.manifest import Category
from .coco import DataError


@dataclass(frozen=True, slots=True)
class ConvertedImage:
    """An image and its COCO annotations, still without ids."""

    file_name: str
    """Relative to the image folder of its split."""
    height: int
    width: int
    annotations: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a data set to convert."""

    images: Path
    """The folder that file names are relative to."""
    sources: tuple[Path, ...]
    """One file an image, in the order of the image ids."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A data set of another format: what is in it, and how it is read."""

    categories: tuple[Category, ...]
    splits: Mapping[str, Split]
    read: Callable[[Path], ConvertedImage]
    """From a source of a split; raises `DataError`."""


@dataclass(frozen=True, slots=True)
class WrittenSplit:
    """A COCO file that was written, and what is in it."""

    path: Path
    images: int
    objects: int
    crowds: int


def write_coco_files(
    conversion: Conversion,
    folder: Path,
    *,
    overwrite: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> dict[str, WrittenSplit]:
    """Write a file `<split>.json` a split; none is there before it is complete.

    Args:
        conversion: what is written.
        folder: made if it does not exist.
        overwrite: replace files that are there.
        on_image: called after every image.

    Raises:
        DataError: a file is there already, or a source cannot be read.
    """
    paths = {name: folder / f"{name}.json" for name in conversion.splits}
    for path in paths.values():
        if path.exists() and not overwrite:
            raise DataError(f"{path} exists; choose another folder, or pass --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, split in conversion.splits.items():
        content = _content_of(conversion, split, on_image)
        with whole_file(paths[name]) as file:
            file.write(json.dumps(content).encode())
        crowds = sum(annotation["iscrowd"] for annotation in content["annotations"])
        objects = len(content["annotations"]) - crowds
        written[name] = WrittenSplit(paths[name], len(content["images"]), objects, crowds)
    return written


def _content_of(
    conversion: Conversion, split: Split, on_image: Callable[[], object]
) -> dict[str, Any]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, source in enumerate(split.sources, start=1):
        image = conversion.read(source)
        images.append(
            {
                "id": image_id,
                "file_name": image.file_name,
                "height": image.height,
                "width": image.width,
            }
        )
        for annotation in image.annotations:
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, **annotation})
        on_image()
    return {
        "info": {},
        "images": images,
        "annotations": annotations,
        "categories": [category.model_dump() for category in conversion.categories],
    }

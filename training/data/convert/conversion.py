"""Write COCO annotation files for a data set of another format."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....model.atomic_files import atomic_write
from ....model.bundle.manifest import Category
from ..coco.dataset import DataError


@dataclass(frozen=True, slots=True)
class ConvertedImage:
    """Image with its converted annotations."""

    # Relative to `SourceSplit.images`.
    file_name: str
    height: int
    width: int
    # COCO annotations without `id` and `image_id`.
    annotations: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SourceSplit:
    """Files of one split of a data set to convert."""

    # Image folder.
    images: Path
    # Annotation file of each image, in the order of the future image ids.
    sources: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class ForeignDataset:
    """Data set in a format other than COCO."""

    categories: tuple[Category, ...]
    splits: Mapping[str, SourceSplit]
    # Function that reads one of `SourceSplit.sources`. It may raise `DataError`.
    read: Callable[[Path], ConvertedImage]


@dataclass(frozen=True, slots=True)
class WrittenSplit:
    """Path of a written COCO file, and the numbers of its images, objects and crowds."""

    path: Path
    images: int
    objects: int
    crowds: int


def write_coco_files(
    dataset: ForeignDataset,
    folder: Path,
    *,
    overwrite: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> dict[str, WrittenSplit]:
    """Convert each split and write it to `<split>.json` atomically.

    Args:
        dataset: The data set to convert.
        folder: Output folder. It is created if it does not exist.
        overwrite: Replace existing files.
        on_image: Called after each image.

    Returns:
        Written file by split.

    Raises:
        DataError: A file exists and `overwrite` is False, or an annotation file cannot be read.
    """
    paths = {name: folder / f"{name}.json" for name in dataset.splits}
    for path in paths.values():
        if path.exists() and not overwrite:
            raise DataError(f"{path} exists; choose another folder, or pass --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, split in dataset.splits.items():
        content = _content_of(dataset, split, on_image)
        with atomic_write(paths[name]) as file:
            file.write(json.dumps(content).encode())
        crowds = sum(annotation["iscrowd"] for annotation in content["annotations"])
        objects = len(content["annotations"]) - crowds
        written[name] = WrittenSplit(paths[name], len(content["images"]), objects, crowds)
    return written


def _content_of(
    dataset: ForeignDataset, split: SourceSplit, on_image: Callable[[], object]
) -> dict[str, Any]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, source in enumerate(split.sources, start=1):
        image = dataset.read(source)
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
        "categories": [category.model_dump() for category in dataset.categories],
    }

"""Read and validate a COCO annotation file, and index its images."""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ....model.bundle.manifest import Category
from ...config import DatasetConfig
from .annotations import (
    Instance,
    InvalidAnnotationError,
    coco_from_segmentation,
    instance_from_annotation,
)

logger = logging.getLogger(__name__)

_IDS_SHOWN = 5
_REMEDY = "give the path of an existing data set, or create one with `maskrcnn data`"


class DataError(Exception):
    """A data set, or one of its files, is missing or invalid."""


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """Path, size and annotations of an image."""

    id: int
    path: Path
    # Size in pixels from the annotation file.
    height: int
    width: int
    # Objects and crowds.
    instances: tuple[Instance, ...]

    @property
    def objects(self) -> tuple[Instance, ...]:
        """Instances that are not crowds: the ground truth of training."""
        return tuple(instance for instance in self.instances if not instance.is_crowd)


class CocoDataset:
    """Images and annotations of a COCO annotation file. Image files are not opened.

    Attributes:
        name: Path of the annotation file, for messages.
        categories: Categories by ascending id. Label 1 is `categories[0]`.
        records: Valid images by ascending id.
        faults: Annotation ids or file names of the invalid entries, by reason.
        skipped_images: Number of invalid entries of the list `images`.
    """

    def __init__(
        self, config: DatasetConfig, on_broken: Literal["skip", "refuse"] = "skip"
    ) -> None:
        """Read and validate the annotation file.

        Args:
            config: Paths of the image folder and the annotation file.
            on_broken: "skip": skip invalid entries and images whose file is missing, and log a
                warning with their number. "refuse": raise `DataError` for them.

        Raises:
            DataError: The folder or file is missing, the file is not in COCO format, it has no
                valid image, or, with "refuse", an entry is invalid.
        """
        self.name = str(config.annotations)
        content = _read_annotation_file(config)
        self.categories = _categories_from(content["categories"], self.name)
        faults: dict[str, list[str]] = defaultdict(list)
        images = _images_from(content["images"], config.images, faults)
        self.skipped_images = len(content["images"]) - len(images)
        listed = {e["id"] for e in content["images"] if isinstance(e.get("id"), int)}
        labels = {category.id: label for label, category in enumerate(self.categories, start=1)}
        instances = _instances_from(content["annotations"], images, listed, labels, faults)
        self.faults: Mapping[str, tuple[str, ...]] = {r: tuple(ids) for r, ids in faults.items()}
        if faults:
            self._report(on_broken)
        if not images:
            raise DataError(f"{self.name} lists no valid image")
        self.records = tuple(
            ImageRecord(id_, path, height, width, tuple(instances[id_]))
            for id_, (path, height, width) in sorted(images.items())
        )

    def __len__(self) -> int:
        return len(self.records)

    def ground_truth(self, image_ids: Iterable[int] | None = None) -> dict[str, Any]:
        """Return the content of a COCO annotation file with all valid annotations, with new ids.

        Args:
            image_ids: Ids of the images to include. None: all images.
        """
        chosen = set(image_ids) if image_ids is not None else {r.id for r in self.records}
        records = [record for record in self.records if record.id in chosen]
        pairs = [(record, instance) for record in records for instance in record.instances]
        return {
            "info": {},
            "images": [
                {"id": r.id, "file_name": r.path.name, "height": r.height, "width": r.width}
                for r in records
            ],
            "categories": [category.model_dump() for category in self.categories],
            # New ids, because pycocotools treats an annotation with id 0 as unmatched, and keeps
            # only the last of several annotations with the same id.
            "annotations": [
                {
                    "id": number,
                    "image_id": record.id,
                    "category_id": self.categories[instance.label - 1].id,
                    "bbox": list(instance.bbox),
                    "area": instance.area,
                    "iscrowd": int(instance.is_crowd),
                    "segmentation": coco_from_segmentation(instance.segmentation),
                }
                for number, (record, instance) in enumerate(pairs, start=1)
            ],
        }

    def _report(self, on_broken: Literal["skip", "refuse"]) -> None:
        reasons = "; ".join(
            f"{len(ids)} {reason} ({', '.join(ids[:_IDS_SHOWN])}"
            f"{', ...' if len(ids) > _IDS_SHOWN else ''})"
            for reason, ids in self.faults.items()
        )
        if on_broken == "refuse":
            raise DataError(
                f"{self.name} has invalid entries: {reasons}; repair them, or skip them with "
                "data.on_broken=skip"
            )
        logger.warning("%s: skipped invalid entries: %s", self.name, reasons)


def _read_annotation_file(config: DatasetConfig) -> dict[str, list[Any]]:
    if not config.images.is_dir():
        raise DataError(f"image folder {config.images} does not exist; {_REMEDY}")
    try:
        content: dict[str, list[Any]] = json.loads(config.annotations.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {config.annotations}: {error.strerror}; {_REMEDY}") from None
    except ValueError as error:
        raise DataError(f"{config.annotations} is not JSON: {error}") from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f"{config.annotations} is not in COCO format: it has no array {key!r}")
        if not all(isinstance(entry, dict) for entry in content[key]):
            raise DataError(
                f"{config.annotations} is not in COCO format: {key!r} is not an array of objects"
            )
    return content


def _categories_from(entries: list[dict[str, Any]], name: str) -> tuple[Category, ...]:
    by_id = {}
    for entry in entries:
        id_, title = entry.get("id"), entry.get("name")
        if not isinstance(id_, int) or not isinstance(title, str):
            raise DataError(f"{name} has a category without an integer id and a name: {entry}")
        if id_ in by_id:
            raise DataError(f"{name} has two categories with id {id_}")
        by_id[id_] = Category(id=id_, name=title)
    if not by_id:
        raise DataError(f"{name} has no categories")
    return tuple(by_id[id_] for id_ in sorted(by_id))


def _images_from(
    entries: list[dict[str, Any]], folder: Path, faults: dict[str, list[str]]
) -> dict[int, tuple[Path, int, int]]:
    """Return path, height and width of each valid image by id. Add the invalid ones to `faults`."""
    # One listing instead of a `stat` per file saves minutes on a network file system.
    present = {entry.name for entry in os.scandir(folder)}
    images: dict[int, tuple[Path, int, int]] = {}
    for entry in entries:
        id_, name = entry.get("id"), entry.get("file_name")
        height, width = entry.get("height"), entry.get("width")
        if not isinstance(id_, int) or not isinstance(name, str):
            faults["images: no integer id or no file name"].append(str(name or id_))
        elif id_ in images:
            faults["images: duplicate id"].append(name)
        elif not (isinstance(height, int) and isinstance(width, int) and min(height, width) > 0):
            faults["images: no height and width"].append(name)
        elif name not in present and not (folder / name).is_file():
            faults["images: file missing"].append(name)
        else:
            images[id_] = (folder / name, height, width)
    return images


def _instances_from(
    entries: list[dict[str, Any]],
    images: Mapping[int, tuple[Path, int, int]],
    listed: Set[int],
    labels: Mapping[int, int],
    faults: dict[str, list[str]],
) -> Mapping[int, list[Instance]]:
    """Return the valid instances by image id. Add invalid annotations of valid images to `faults`.

    `listed` contains the ids of all images in the file, `images` only the valid ones.
    """
    instances: dict[int, list[Instance]] = defaultdict(list)
    for entry in entries:
        image_id, name = entry.get("image_id"), str(entry.get("id", "without id"))
        if not isinstance(image_id, int) or image_id not in listed:
            faults["annotations: unknown image"].append(name)
        elif image_id in images:
            _, height, width = images[image_id]
            try:
                instance = instance_from_annotation(entry, height, width, labels)
            except InvalidAnnotationError as error:
                faults[f"annotations: {error}"].append(name)
            else:
                instances[image_id].append(instance)
    return instances

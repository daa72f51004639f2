"""Read and validate a COCO annotation file, and index its images."""

import gc
import json
import logging
import re
import reprlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json

from ....model.bundle.manifest import Category
from ...config import DatasetConfig
from ...garbage_collection import no_garbage_collection
from .annotations import Instance, coco_from_segmentation
from .entries import Findings, index_annotations, index_images
from .numbers import integer_from

logger = logging.getLogger(__name__)

_IDS_SHOWN = 5
# Signature of gzip, which is never valid UTF-8.
_GZIP = b"\x1f\x8b"
# Lone surrogates, which Python uses for bytes of file names that are not UTF-8. They cannot be
# encoded as UTF-8.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REMEDY = "give the path of an existing data set, or create one with `maskrcnn data`"


class DataError(Exception):
    """A data set, or one of its files, is missing or invalid."""


@dataclass(frozen=True, slots=True)
class CocoContent:
    """Content of a COCO file, and names of the entries that conversion or editing left out."""

    content: dict[str, Any]
    # Names of the left-out entries in the original files, by reason.
    faults: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """Path, size and annotations of an image."""

    id: int
    path: Path
    # Size in pixels from the annotation file or, if it lacks the size, from the image's header.
    height: int
    width: int
    # Objects and crowds.
    instances: tuple[Instance, ...]
    # Average number of times that a training epoch shows the image, without repeat-factor sampling.
    weight: float = 1.0

    @property
    def objects(self) -> tuple[Instance, ...]:
        """The image's instances that are not crowds: its ground truth in training."""
        return tuple(instance for instance in self.instances if not instance.is_crowd)


class CocoDataset:
    """Images and annotations of a COCO annotation file.

    An image file is opened only if the annotation file lacks the size of the image.

    Attributes:
        config: Paths of the image folder and the annotation file.
        name: Path of the annotation file, for messages.
        categories: Categories by ascending id. Label 1 is `categories[0]`.
        records: Valid images by ascending id.
        string_ids: Ids that are strings in the annotation file, by the integers that replace them:
            image ids under the key `image_id`, category ids under `category_id`.
        faults: Annotation ids or file names of the invalid entries, by reason.
        repairs: Annotation ids, file names or category names of repaired entries, by reason.
        skipped_images: Number of invalid entries of the list `images`.
    """

    @no_garbage_collection()
    def __init__(
        self,
        config: DatasetConfig,
        on_broken: Literal["skip", "refuse"] = "skip",
        source: CocoContent | None = None,
    ) -> None:
        """Read and validate the annotation file.

        Args:
            config: Paths of the image folder and the annotation file.
            on_broken: "skip": leave out invalid entries, and log a warning with their count.
                "refuse": raise `DataError` if there are invalid entries. An image whose file is
                missing is an invalid entry.
            source: Annotations converted from another format, to use instead of the annotation
                file. None: read the annotation file, which must be in COCO format.

        Raises:
            DataError: The image folder or the annotation file is missing, the file is not in COCO
                format, its categories are missing or invalid, it has no valid image, or, with
                "refuse", an entry is invalid.
        """
        self.config = config
        self.name = str(config.annotations)
        if not config.images.is_dir():
            raise DataError(f"image folder {config.images.absolute()} does not exist; {_REMEDY}")
        content = source.content if source else read_coco_file(config.annotations)
        faults: Findings = defaultdict(list)
        repairs: Findings = defaultdict(list)
        faults.update({r: [*names] for r, names in (source.faults if source else {}).items()})
        self.categories = _categories_from(content["categories"], self.name, repairs)
        images = index_images(content["images"], config.images, faults, repairs)
        self.string_ids = {
            "image_id": images.strings,
            "category_id": _string_ids(content["categories"]),
        }
        self.skipped_images = len(content["images"]) - len(images.valid)
        labels = {category.id: label for label, category in enumerate(self.categories, start=1)}
        instances = index_annotations(content["annotations"], images, labels, faults, repairs)
        self.faults: Mapping[str, tuple[str, ...]] = {r: tuple(ids) for r, ids in faults.items()}
        self.repairs: Mapping[str, tuple[str, ...]] = {r: tuple(ids) for r, ids in repairs.items()}
        self._report(on_broken, len(content["annotations"]))
        if not content["images"]:
            raise DataError(
                f"{self.name} lists no images; add images to its array 'images', or remove the file"
            )
        if not images.valid:
            reasons = f": {summary_of(self.faults)}" if self.faults else ""
            raise DataError(f"{self.name} lists no valid image in {config.images}{reasons}")
        self.records = tuple(
            ImageRecord(image.id, image.path, image.height, image.width, tuple(instances[image.id]))
            for image in sorted(images.valid.values(), key=lambda image: image.id)
        )
        # Exclude the records from later garbage collections, which would take seconds to traverse
        # them and free none.
        gc.freeze()

    def __len__(self) -> int:
        return len(self.records)

    def ground_truth(self, image_ids: Collection[int]) -> dict[str, Any]:
        """Return the valid annotations of some images as the content of a COCO annotation file.

        Annotations get new ids, from 1. Images and categories keep their ids.
        """
        records = [record for record in self.records if record.id in image_ids]
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

    def _report(self, on_broken: Literal["skip", "refuse"], annotations: int) -> None:
        if self.faults and on_broken == "refuse":
            raise DataError(
                f"{self.name} has invalid entries: {summary_of(self.faults)}; repair them, or skip "
                "them with data.on_broken=skip"
            )
        if self.faults:
            # The conversion has already left out invalid YOLO lines and LabelMe shapes.
            converted = self._number_of_faults("labels:", "shapes:")
            skipped = self._number_of_faults("annotations:") + converted
            logger.warning(
                "%s: skipped invalid entries: %s%s",
                self.name,
                summary_of(self.faults),
                f"; {skipped} of {annotations + converted} annotations are skipped, so their "
                "objects count as background"
                if skipped
                else "",
            )
        if self.repairs:
            logger.warning("%s: repaired entries: %s", self.name, summary_of(self.repairs))

    def _number_of_faults(self, *kinds: str) -> int:
        return sum(len(ids) for reason, ids in self.faults.items() if reason.startswith(kinds))


def summary_of(findings: Mapping[str, Sequence[str]]) -> str:
    """Format invalid or repaired entries for a message: their number and some names, by reason.

    `findings` maps reasons, such as "images: file missing", to names of entries.
    """
    return "; ".join(
        f"{len(ids)} {reason} ({', '.join(ids[:_IDS_SHOWN])}"
        f"{', ...' if len(ids) > _IDS_SHOWN else ''})"
        for reason, ids in findings.items()
    )


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DataError: The file cannot be read or is not JSON.
    """
    try:
        content = path.read_bytes()
        try:
            return from_json(content)
        except ValueError:
            # `json` is three times as slow as `from_json`, but accepts byte order marks, UTF-16 and
            # lone surrogates.
            return json.loads(content)
    except OSError as error:
        raise DataError(f"cannot read {path.absolute()}: {error.strerror}; {_REMEDY}") from None
    except RecursionError:
        raise DataError(f"{path} is nested too deeply to be an annotation file") from None
    except UnicodeDecodeError as error:
        if content.startswith(_GZIP):
            raise DataError(f"{path} is compressed with gzip; decompress it") from None
        raise DataError(f"{path} is not in UTF-8: {error}; convert it to UTF-8") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None


def read_coco_file(path: Path) -> dict[str, Any]:
    """Read a COCO annotation file. Check that it has `images`, `annotations` and `categories`.

    Raises:
        DataError: The file cannot be read, or is not in COCO format.
    """
    content: dict[str, Any] = read_json(path)
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f"{path} is not in COCO format: it has no array {key!r}")
        for number, entry in enumerate(content[key]):
            if not isinstance(entry, dict):
                raise DataError(
                    f"{path} is not in COCO format: {key!r} is not an array of objects; entry "
                    f"{number} is {reprlib.repr(entry)}"
                )
    return content


def _categories_from(
    entries: list[dict[str, Any]], name: str, repairs: Findings
) -> tuple[Category, ...]:
    names: dict[int, str] = {}
    for entry in entries:
        id_, title = integer_from(entry.get("id")), entry.get("name")
        if id_ is None:
            raise DataError(f"{name} has a category without an integer id (int64): {entry}")
        if not isinstance(title, str):
            raise DataError(f"{name} has a category whose name is missing or not a string: {entry}")
        if LONE_SURROGATE.search(title):
            raise DataError(
                f"{name} has a category whose name is not Unicode text: {entry}; rename it"
            )
        if id_ in names:
            raise DataError(
                f"{name} has two categories with id {id_}; give each category a different id"
            )
        names[id_] = title
    if not names:
        raise DataError(f"{name} has no categories; add the classes to its array 'categories'")
    for title, count in Counter(names.values()).items():
        if count > 1:
            # Metrics are stored by class name, so equal names would be merged.
            repairs["categories: several have the same name; the id was added to each name"].append(
                title
            )
    pairs = sorted(names.items())
    titles = distinct_names(pairs)
    return tuple(
        Category(id=id_, name=title) for (id_, _), title in zip(pairs, titles, strict=True)
    )


def _string_ids(categories: list[dict[str, Any]]) -> dict[int, str]:
    """Return the ids of valid categories that are strings, such as `"7"`, by their integers."""
    ids = (category["id"] for category in categories)
    return {int(id_): id_ for id_ in ids if isinstance(id_, str)}


def distinct_names(categories: Sequence[tuple[int | str | None, str]]) -> list[str]:
    """Return the names of categories, given as pairs of id and name.

    If several categories have the same name, each of them is called `NAME (ID)`.
    """
    frequency = Counter(name for _, name in categories)
    return [name if frequency[name] == 1 else f"{name} ({id_})" for id_, name in categories]

"""Compute a data set's report: statistics, invalid entries and suspicious annotations."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....model.resizing import resized_size
from ..coco.dataset import CocoDataset
from ..coco.splits import splits_named
from .annotation_checks import Suspicion, suspicious_annotations
from .class_checks import suspicious_classes
from .file_checks import (
    misfit_files,
    read_headers,
    rotated_files,
    suspicious_files,
    undecodable_files,
    unlisted_files,
)

# COCO's upper area limits of small and of medium objects, in square pixels.
_SMALL, _MEDIUM = 32**2, 96**2


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Minimum, quantiles (10 %, 50 % and 90 %) and maximum of a quantity."""

    min: float
    p10: float
    p50: float
    p90: float
    max: float


@dataclass(frozen=True, slots=True)
class ClassCount:
    """Annotation counts of one class in a split."""

    id: int
    name: str
    objects: int
    crowds: int
    # Number of images with at least one object of the class.
    images: int


# The fields of a report are keys of the JSON file that `maskrcnn data inspect --json` writes.
@dataclass(frozen=True, slots=True)
class SplitReport:
    """Statistics of a split, and its invalid and suspicious entries.

    The statistics do not include invalid entries.
    """

    image_folder: str
    annotation_file: str
    images: int
    images_without_objects: int
    objects: int
    crowds: int
    # Number of images by orientation: "landscape", "portrait" and "square".
    orientations: Mapping[str, int]
    # Number of images by effect of resizing: "enlarged", "reduced" and "unchanged".
    resizing: Mapping[str, int]
    # Quantiles over the images. The keys are the quantities "width", "height", "aspect" (width /
    # height) and "objects" (number per image).
    distributions: Mapping[str, Quantiles]
    # Number of objects by COCO's size class: "small", "medium" and "large".
    object_sizes: Mapping[str, int]
    # By descending number of objects.
    classes: tuple[ClassCount, ...]
    # Annotation ids and file names of invalid entries, by reason.
    faults: Mapping[str, tuple[str, ...]]
    # Annotation ids, file names or category names of repaired entries, by reason.
    repairs: Mapping[str, tuple[str, ...]]
    # Ids of suspicious annotations, names of suspicious classes, and errors that training would
    # raise, by reason.
    suspicions: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """Statistics of a data set, and its invalid and suspicious entries."""

    # By name of the split.
    splits: Mapping[str, SplitReport]
    # Paths of invalid and suspicious image files of all splits, by reason.
    files: Mapping[str, tuple[str, ...]]
    # All suspicious annotations and files, for the grid of sample images.
    suspicions: tuple[Suspicion, ...] = field(repr=False)


def inspect_splits(
    splits: Mapping[str, CocoDataset],
    *,
    min_size: int,
    max_size: int,
    decode: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> DatasetReport:
    """Compute the statistics of a data set and check its annotations and files.

    Args:
        splits: Splits by name.
        min_size: Shorter side of resized images in pixels, as in `data.min_size`.
        max_size: Upper limit of the longer side in pixels, as in `data.max_size`.
        decode: Also decode each image, which takes some milliseconds per image. False: read only
            the headers of the files.
        on_image: Called after each decoded image.
    """
    records = [record for split in splits.values() for record in split.records]
    headers = read_headers(records)
    of_files = suspicious_files(records)
    of_files += undecodable_files(records, on_image) if decode else misfit_files(records, headers)
    of_files += rotated_files(records, headers)
    files = _subjects_by_reason(of_files)
    if unlisted := _unlisted_in(splits.values()):
        files["file that is not listed"] = tuple(map(str, unlisted))
    of_annotations = {name: suspicious_annotations(split.records) for name, split in splits.items()}
    train = next((splits[name] for name in splits_named(splits, "train")), None)
    return DatasetReport(
        splits={
            name: _inspect_split(split, train, of_annotations[name], min_size, max_size)
            for name, split in splits.items()
        },
        files=files,
        suspicions=(*of_files, *chain.from_iterable(of_annotations.values())),
    )


def _unlisted_in(splits: Iterable[CocoDataset]) -> list[Path]:
    folders, listed = set(), set()
    for dataset in splits:
        config = dataset.config
        folders.add(config.images)
        listed |= {record.path for record in dataset.records}
        for reason, names in dataset.faults.items():
            if reason.startswith("images:"):
                # Names are relative to the image folder or, in YOLO, to the YAML file's folder.
                parents = config.images, config.annotations.parent.absolute()
                listed |= {parent / name for parent in parents for name in names}
    return unlisted_files(folders, listed)


def _inspect_split(
    dataset: CocoDataset,
    train: CocoDataset | None,
    suspicions: Iterable[Suspicion],
    min_size: int,
    max_size: int,
) -> SplitReport:
    records = dataset.records
    heights = np.array([record.height for record in records])
    widths = np.array([record.width for record in records])
    resized = np.array([resized_size(r.height, r.width, min_size, max_size)[0] for r in records])
    counts = np.array([len(record.objects) for record in records])
    areas = np.array([o.area for record in records for o in record.objects])
    return SplitReport(
        image_folder=str(dataset.config.images),
        annotation_file=dataset.name,
        images=len(records),
        images_without_objects=int((counts == 0).sum()),
        objects=int(counts.sum()),
        crowds=sum(instance.is_crowd for record in records for instance in record.instances),
        orientations=_counts(
            landscape=widths > heights, portrait=widths < heights, square=widths == heights
        ),
        resizing=_counts(
            enlarged=resized > heights, reduced=resized < heights, unchanged=resized == heights
        ),
        distributions={
            "width": _quantiles(widths),
            "height": _quantiles(heights),
            "aspect": _quantiles(widths / heights),
            "objects": _quantiles(counts),
        },
        object_sizes=_counts(
            small=areas < _SMALL,
            medium=(areas >= _SMALL) & (areas < _MEDIUM),
            large=areas >= _MEDIUM,
        ),
        classes=_class_counts(dataset),
        faults=dataset.faults,
        repairs=dataset.repairs,
        suspicions=_subjects_by_reason(suspicions)
        | {reason: tuple(names) for reason, names in suspicious_classes(dataset, train).items()},
    )


def _counts(**cases: NDArray[np.bool_]) -> dict[str, int]:
    return {name: int(is_case.sum()) for name, is_case in cases.items()}


def _quantiles(values: NDArray[Any]) -> Quantiles:
    return Quantiles(*np.percentile(values, (0, 10, 50, 90, 100), method="inverted_cdf").tolist())


def _class_counts(dataset: CocoDataset) -> tuple[ClassCount, ...]:
    objects: Counter[int] = Counter()
    crowds: Counter[int] = Counter()
    images: Counter[int] = Counter()
    for record in dataset.records:
        for instance in record.instances:
            (crowds if instance.is_crowd else objects)[instance.label] += 1
        images.update({instance.label for instance in record.objects})
    classes = (
        ClassCount(category.id, category.name, objects[label], crowds[label], images[label])
        for label, category in enumerate(dataset.categories, start=1)
    )
    return tuple(sorted(classes, key=lambda c: (-c.objects, c.id)))


def _subjects_by_reason(suspicions: Iterable[Suspicion]) -> dict[str, tuple[str, ...]]:
    subjects: dict[str, list[str]] = defaultdict(list)
    for suspicion in suspicions:
        subjects[suspicion.reason].append(suspicion.subject)
    return {reason: tuple(names) for reason, names in subjects.items()}

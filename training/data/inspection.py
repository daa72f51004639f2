"""Inspection of data sets: what is in them, and what is or looks wrong."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...model.images import resized_size
from ..config import DatasetConfig
from .annotation_checks import Suspicion, suspicious_annotations
from .coco import CocoDataset
from .file_checks import suspicious_files, undecodable_files, unlisted_files

_SMALL, _MEDIUM = 32**2, 96**2
"""COCO's limits: areas in pixels below which an object is small, and medium."""


class LoadedSplit(NamedTuple):
    """A split of a data set: where it is, and what was read there."""

    config: DatasetConfig
    dataset: CocoDataset


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Smallest and largest value of a sample, and three that lie at shares of it in between."""

    min: float
    p10: float
    p50: float
    p90: float
    max: float


@dataclass(frozen=True, slots=True)
class ClassCount:
    """How often a class was annotated."""

    id: int
    name: str
    objects: int
    crowds: int
    images: int
    """Images with at least one object of it."""


@dataclass(frozen=True, slots=True)
class SplitInspection:
    """What is in one annotation file and its images; of what can be used, unless said otherwise."""

    image_folder: str
    annotation_file: str
    images: int
    images_without_objects: int
    objects: int
    crowds: int
    orientations: Mapping[str, int]
    """Images that are landscape, portrait and square."""
    resizing: Mapping[str, int]
    """Images that are enlarged, reduced and unchanged on their way into the model."""
    distributions: Mapping[str, Quantiles]
    """Of width, height and aspect (width / height) of the images, and objects an image."""
    object_sizes: Mapping[str, int]
    """Objects that are small, medium and large in COCO's sense."""
    classes: tuple[ClassCount, ...]
    """The most frequent first; all of the file, with or without objects."""
    faults: Mapping[str, tuple[str, ...]]
    """Annotation ids and file names that cannot be used, by reason."""
    suspicions: Mapping[str, tuple[str, ...]]
    """Ids of annotations that look wrong, by reason."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a data set."""

    splits: Mapping[str, SplitInspection]
    files: Mapping[str, tuple[str, ...]]
    """Image files of all splits that are or look wrong, by reason."""
    suspicions: tuple[Suspicion, ...] = field(repr=False)
    """All that was found suspicious, to be shown."""


def inspect_splits(
    splits: Mapping[str, LoadedSplit],
    *,
    min_size: int,
    max_size: int,
    decode: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> Inspection:
    """Count what is in the splits of a data set, and look for what is wrong.

    Args:
        splits: by name.
        min_size: shorter side of an image in pixels after resizing.
        max_size: longer side of an image in pixels after resizing, at most.
        decode: decode every image as well, which takes some milliseconds each.
        on_image: called after every decoded image.
    """
    records = [record for split in splits.values() for record in split.dataset.records]
    in_files = suspicious_files(records)
    if decode:
        in_files += undecodable_files(records, on_image)
    files = _subjects_by_reason(in_files)
    if unlisted := _unlisted_in(splits.values()):
        files["file that is not listed"] = tuple(map(str, unlisted))
    in_annotations = {
        name: suspicious_annotations(split.dataset.records) for name, split in splits.items()
    }
    return Inspection(
        splits={
            name: _inspect(split, in_annotations[name], min_size, max_size)
            for name, split in splits.items()
        },
        files=files,
        suspicions=(*in_files, *chain.from_iterable(in_annotations.values())),
    )


def _unlisted_in(splits: Iterable[LoadedSplit]) -> list[Path]:
    folders, listed = set(), set()
    for config, dataset in splits:
        folders.add(config.images)
        listed |= {record.path for record in dataset.records}
        for reason, names in dataset.faults.items():
            if reason.startswith("images:"):
                listed |= {config.images / name for name in names}
    return unlisted_files(folders, listed)


def _inspect(
    split: LoadedSplit, suspicions: Iterable[Suspicion], min_size: int, max_size: int
) -> SplitInspection:
    config, dataset = split
    records = dataset.records
    heights = np.array([record.height for record in records])
    widths = np.array([record.width for record in records])
    resized = np.array([resized_size(r.height, r.width, min_size, max_size)[0] for r in records])
    counts = np.array([len(record.objects) for record in records])
    areas = np.array([o.area for record in records for o in record.objects])
    return SplitInspection(
        image_folder=str(config.images),
        annotation_file=str(config.annotations),
        images=len(records),
        images_without_objects=int((counts == 0).sum()),
        objects=int(counts.sum()),
        crowds=sum(len(record.instances) for record in records) - int(counts.sum()),
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
        classes=_classes_of(dataset),
        faults=dataset.faults,
        suspicions=_subjects_by_reason(suspicions),
    )


def _counts(**cases: NDArray[np.bool_]) -> dict[str, int]:
    return {name: int(is_case.sum()) for name, is_case in cases.items()}


def _quantiles(values: NDArray[Any]) -> Quantiles:
    return Quantiles(*np.percentile(values, (0, 10, 50, 90, 100), method="inverted_cdf").tolist())


def _classes_of(dataset: CocoDataset) -> tuple[ClassCount, ...]:
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

"""Draw the validation images with the most errors: ground truth beside detections."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from ...model.masks import Rle
from ..data.coco.annotations import Instance, coco_from_segmentation
from ..data.coco.dataset import CocoDataset, ImageRecord
from ..data.inspect.annotation_checks import Suspicion
from ..data.inspect.sample_grid import GridSample, draw_samples
from ..evaluation.result_files import RESULTS_FOLDER

WORST_FILE = "worst.png"
# Number of images, each with its ground truth and its detections.
_MAX_IMAGES = 8
# Minimum score of detections, and minimum mask IoU with an object that they detect.
_MIN_SCORE, _MIN_IOU = 0.5, 0.5


class ImageErrors(NamedTuple):
    """Errors of the detections of one image."""

    record: ImageRecord
    # Detections with a score of at least 0.5.
    detections: tuple[Instance, ...]
    # Objects without a detection of their class.
    missed: int
    # Detections without an object of their class.
    wrong: int


def draw_worst_images(dataset: CocoDataset, folder: Path) -> Path | None:
    """Draw the images with the most errors in the latest evaluation of a run.

    Args:
        dataset: Validation set of the run.
        folder: Folder of the run.

    Returns:
        The PNG file. None: no image has an error.
    """
    errors = [entry for entry in find_errors(dataset, folder) if entry.missed + entry.wrong]
    errors.sort(key=lambda entry: -(entry.missed + entry.wrong))
    samples = []
    for record, detections, missed, wrong in errors[:_MAX_IMAGES]:
        detected = ImageRecord(record.id, record.path, record.height, record.width, detections)
        samples += [
            GridSample(image, dataset.categories, Suspicion(title, image))
            for title, image in (
                ("annotated", record),
                (f"detected: {missed} missed, {wrong} wrong", detected),
            )
        ]
    if not samples:
        return None
    draw_samples(samples, folder / WORST_FILE)
    return folder / WORST_FILE


def find_errors(dataset: CocoDataset, folder: Path) -> list[ImageErrors]:
    """Compare the detections of the latest evaluation of a run with the ground truth.

    A detection is correct if its mask has an IoU of at least 0.5 with an object of its class.
    Detections inside crowds are ignored.
    """
    results = json.loads((folder / RESULTS_FOLDER / "segm.json").read_text())
    labels = {category.id: label for label, category in enumerate(dataset.categories, start=1)}
    by_image: dict[int, list[Instance]] = defaultdict(list)
    for result in sorted(results, key=lambda result: -result["score"]):
        if result["score"] >= _MIN_SCORE and result["category_id"] in labels:
            by_image[result["image_id"]].append(_instance_from(result, labels))
    return [_errors_of(record, tuple(by_image[record.id])) for record in dataset.records]


def _instance_from(result: dict[str, Any], labels: dict[int, int]) -> Instance:
    height, width = result["segmentation"]["size"]
    rle = Rle(height, width, result["segmentation"]["counts"].encode())
    x, y, w, h = coco_mask.toBbox(result["segmentation"]).tolist()
    area = float(coco_mask.area(result["segmentation"]))
    return Instance(0, labels[result["category_id"]], (x, y, w, h), area, False, rle)


def _errors_of(record: ImageRecord, detections: tuple[Instance, ...]) -> ImageErrors:
    overlaps = _mask_ious(record, detections)
    found: set[int] = set()
    wrong = 0
    for detection, row in zip(detections, overlaps, strict=True):
        matches = [
            n
            for n, truth in enumerate(record.instances)
            if truth.label == detection.label and row[n] >= _MIN_IOU and n not in found
        ]
        # Each object is detected once, but a crowd any number of times.
        if not matches:
            wrong += 1
        elif not record.instances[best := max(matches, key=row.__getitem__)].is_crowd:
            found.add(best)
    return ImageErrors(record, detections, len(record.objects) - len(found), wrong)


def _mask_ious(record: ImageRecord, detections: tuple[Instance, ...]) -> NDArray[np.float64]:
    """Return the mask IoU `[D, G]` of detections and ground truth; of crowds, the share inside."""
    if not detections or not record.instances:
        return np.zeros((len(detections), len(record.instances)))
    size = (record.height, record.width)
    encoded = [[_encoded(i, size) for i in part] for part in (detections, record.instances)]
    crowds = [int(instance.is_crowd) for instance in record.instances]
    ious: NDArray[np.float64] = coco_mask.iou(*encoded, crowds)
    return ious


def _encoded(instance: Instance, size: tuple[int, int]) -> Any:
    value = coco_from_segmentation(instance.segmentation)
    return (
        value if isinstance(value, dict) else coco_mask.merge(coco_mask.frPyObjects(value, *size))
    )

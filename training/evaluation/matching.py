"""Match detections with the ground truth by mask IoU: curves, best thresholds, confusion matrix."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from ...model.masks import Rle
from ..data.coco.annotations import Instance, coco_from_segmentation
from ..data.coco.dataset import CocoDataset, ImageRecord

# Minimum mask IoU of a detection with the object that it matches.
MIN_IOU = 0.5
# Score threshold for drawn detections, and for classes of which no detection is correct.
DEFAULT_THRESHOLD = 0.5


class MatchedImage(NamedTuple):
    """D detections of one image, matched with its G annotated instances."""

    record: ImageRecord
    # In descending order of score.
    detections: tuple[Instance, ...]
    # [D].
    scores: NDArray[np.float64]
    # [D, G] mask IoU of each detection with each instance. For a crowd: the share of the detection
    # that is inside the crowd.
    ious: NDArray[np.float64]
    # [D] index of the matching instance of the detection's class. -1: no match.
    matches: NDArray[np.int64]

    @property
    def crowds(self) -> NDArray[np.bool_]:
        """`[G]`: whether each annotated instance is a crowd."""
        return np.array([instance.is_crowd for instance in self.record.instances], bool)

    @property
    def ignored(self) -> NDArray[np.bool_]:
        """`[D]`: whether each detection matches a crowd. It is then neither correct nor wrong."""
        inside: NDArray[np.bool_] = np.append(self.crowds, False)[self.matches]
        return inside

    @property
    def correct(self) -> NDArray[np.bool_]:
        """`[D]`: whether each detection matches an object that is not a crowd."""
        return (self.matches >= 0) & ~self.ignored

    def above(self, thresholds: Sequence[float]) -> NDArray[np.bool_]:
        """Return for each detection `[D]` whether its score reaches the threshold of its class.

        `thresholds` has one value per class, in the order of the labels.
        """
        limits = [thresholds[detection.label - 1] for detection in self.detections]
        return self.scores >= np.array(limits, np.float64)


class ClassCurve(NamedTuple):
    """Precision and recall of one class at N score thresholds, from high to low."""

    # Number of objects of the class, without crowds.
    objects: int
    # [N] distinct scores, used as thresholds.
    scores: NDArray[np.float64]
    # Precision and recall [N] of the detections whose score is at least the threshold.
    precision: NDArray[np.float64]
    recall: NDArray[np.float64]

    @property
    def f1(self) -> NDArray[np.float64]:
        """`[N]`: harmonic mean of precision and recall at each score threshold."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / np.where(total > 0, total, 1)

    @property
    def best(self) -> int | None:
        """Index of the score threshold with the highest F1. None: no detection is correct."""
        f1 = self.f1
        return int(f1.argmax()) if f1.any() else None

    @property
    def best_threshold(self) -> float:
        """Score threshold with the highest F1, or 0.5 if no detection is correct."""
        return DEFAULT_THRESHOLD if self.best is None else float(self.scores[self.best])


def matched_images(
    dataset: CocoDataset, results: Iterable[Mapping[str, Any]], image_ids: set[int] | None = None
) -> list[MatchedImage]:
    """Match detections with the ground truth of their class, by COCO's rule at an IoU of 0.5.

    Args:
        dataset: Data set with the ground truth. Detections of classes that it lacks are left out.
        results: Detections with masks in COCO's results format.
        image_ids: Ids of the images to include. None: all images.
    """
    labels = {category.id: label for label, category in enumerate(dataset.categories, start=1)}
    by_image: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        if result["category_id"] in labels:
            by_image[result["image_id"]].append(result)
    return [
        _matched(record, by_image[record.id], labels)
        for record in dataset.records
        if image_ids is None or record.id in image_ids
    ]


def class_curves(images: Iterable[MatchedImage], classes: int) -> list[ClassCurve]:
    """Return the precision-recall curves of the classes with labels 1 to `classes`."""
    objects = np.zeros(classes, int)
    scores: list[list[float]] = [[] for _ in range(classes)]
    correct: list[list[bool]] = [[] for _ in range(classes)]
    for image in images:
        for instance in image.record.objects:
            objects[instance.label - 1] += 1
        rows = zip(image.detections, image.scores, image.correct, image.ignored, strict=True)
        for detection, score, is_correct, is_ignored in rows:
            if not is_ignored:
                scores[detection.label - 1].append(float(score))
                correct[detection.label - 1].append(bool(is_correct))
    return [
        _curve(int(count), np.array(s, float), np.array(c, bool))
        for count, s, c in zip(objects, scores, correct, strict=True)
    ]


def confusion_matrix(
    images: Iterable[MatchedImage], thresholds: Sequence[float]
) -> NDArray[np.int64]:
    """Count detections and missed objects by the object's class and the detected class.

    Detections below the threshold of their class, and those that match a crowd, are ignored. If a
    detection matches no object of its class, it can match an object of another class that no other
    detection matches.

    Args:
        images: Matched detections.
        thresholds: Minimum score of each class, in the order of the labels.

    Returns:
        [C + 1, C + 1] counts for C classes. Rows: class of the object; last row: detections without
        an object. Columns: class of the detection; last column: missed objects.
    """
    none = len(thresholds)
    counts = np.zeros((none + 1, none + 1), np.int64)
    for image in images:
        kept = image.above(thresholds)
        truth = np.array([i.label - 1 for i in image.record.instances], int)
        found = np.array([d.label - 1 for d in image.detections], int)
        correct = kept & image.correct
        np.add.at(counts, (truth[image.matches[correct]], found[correct]), 1)
        free = ~image.crowds
        free[image.matches[correct]] = False
        others = kept & (image.matches < 0)
        allowed = np.broadcast_to(free, image.ious[others].shape)
        matches = _match(image.ious[others], allowed, image.crowds)
        np.add.at(counts, (np.append(truth, none)[matches], found[others]), 1)
        free[matches[matches >= 0]] = False
        np.add.at(counts[:, none], truth[free], 1)
    return counts


def _matched(
    record: ImageRecord, results: list[Mapping[str, Any]], labels: Mapping[int, int]
) -> MatchedImage:
    results = sorted(results, key=lambda result: -result["score"])
    detections = tuple(_instance_from(result, labels) for result in results)
    ious = _mask_ious(record, detections)
    same = np.array(
        [[d.label == i.label for i in record.instances] for d in detections], bool
    ).reshape(ious.shape)
    scores = np.array([result["score"] for result in results], float)
    image = MatchedImage(record, detections, scores, ious, np.empty(0, np.int64))
    return image._replace(matches=_match(ious, same, image.crowds))


def _match(
    ious: NDArray[np.float64], allowed: NDArray[np.bool_], crowds: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return for each detection `[D]` the index of the instance that it matches. -1: no match.

    Detections are matched in the order of the rows of `ious`. An instance is a candidate if it is
    allowed, is not a crowd, has an IoU of at least 0.5 with the detection, and matches no earlier
    detection. The detection matches the candidate with the highest IoU. Without a candidate, it
    matches the allowed crowd with the highest IoU, if this IoU is at least 0.5. Any number of
    detections can match the same crowd.

    Args:
        ious: [D, G] mask IoU.
        allowed: [D, G] whether a detection may match an instance.
        crowds: [G] whether an instance is a crowd.
    """
    matches = np.full(len(ious), -1)
    free = ~crowds
    for number, row in enumerate(np.where(allowed & (ious >= MIN_IOU), ious, 0)):
        for pool in (free, crowds):
            if (row * pool).any():
                matches[number] = (row * pool).argmax()
                break
        if matches[number] >= 0:
            free[matches[number]] = False
    return matches


def _curve(objects: int, scores: NDArray[np.float64], correct: NDArray[np.bool_]) -> ClassCurve:
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(correct[order])
    # Detections of equal score reach a threshold together, so keep one point of the curve for all.
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True)[: len(scores)])
    return ClassCurve(objects, scores[last], hits[last] / (last + 1), hits[last] / max(objects, 1))


def _instance_from(result: Mapping[str, Any], labels: Mapping[int, int]) -> Instance:
    height, width = result["segmentation"]["size"]
    rle = Rle(height, width, result["segmentation"]["counts"].encode())
    x, y, w, h = coco_mask.toBbox(result["segmentation"]).tolist()
    area = float(coco_mask.area(result["segmentation"]))
    return Instance(0, labels[result["category_id"]], (x, y, w, h), area, False, rle)


def _mask_ious(record: ImageRecord, detections: tuple[Instance, ...]) -> NDArray[np.float64]:
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

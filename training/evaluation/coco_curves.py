"""Compute COCO's precision-recall curves with pycocotools or faster-coco-eval."""

import contextlib
import io
import logging
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import EvaluatorName
from ..garbage_collection import no_garbage_collection

logger = logging.getLogger(__name__)

# "bbox": IoU of boxes. "segm": IoU of masks.
IouType = Literal["bbox", "segm"]
IOU_TYPES: tuple[IouType, IouType] = ("bbox", "segm")
AREAS = ("all", "small", "medium", "large")
# Limits on the number of detections per image (COCO's `maxDets`). Each has its own metrics.
LIMITS = (1, 10, 100)
# Minimum number of detections for which several processes are used. With fewer detections, starting
# the processes takes longer than they save.
_PARALLEL_FROM = 10_000
_MAX_PROCESSES = 8


class Curves(NamedTuple):
    """COCO's precision and recall by IoU threshold, class, object size and detection limit.

    A value of -1 means that the ground truth has no object of the class in the size range.
    """

    # Precision at recall 0, 0.01, ..., 1. Axes: IoU 0.50, 0.55, ..., 0.95; recall; class in
    # ascending order of id; `AREAS`; `LIMITS`.
    precision: NDArray[np.float64]
    # Recall of all detections, at any score. Axes: IoU, class, area, limit.
    recall: NDArray[np.float64]


class _ClassTask(NamedTuple):
    """Detections and ground truth of one class, to match by box IoU or by mask IoU."""

    iou_type: IouType
    # Index of the class among all classes.
    number: int
    images: list[dict[str, Any]]
    truth: list[dict[str, Any]]
    detections: list[dict[str, Any]]


def coco_curves(
    ground_truth: dict[str, Any],
    results: Mapping[IouType, list[dict[str, Any]]],
    evaluator: EvaluatorName,
) -> dict[IouType, Curves]:
    """Compute COCO's precision-recall curves of detections, by box IoU, mask IoU or both.

    Args:
        ground_truth: Parsed COCO annotation file with at least one image.
        results: Detections in COCO's results format, by kind of IoU: `bbox` (box IoU) or `segm`
            (mask IoU).
        evaluator: Library that computes the curves. Both libraries give equal curves.

    Returns:
        Curves by kind of IoU.
    """
    with no_garbage_collection():
        if evaluator == "pycocotools":
            return {t: _curves_of_pycocotools(ground_truth, results[t], t) for t in results}
        return _curves_by_class(ground_truth, results)


def _curves_of_pycocotools(
    ground_truth: dict[str, Any], results: list[dict[str, Any]], iou_type: IouType
) -> Curves:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    # Hide the progress that the library prints to standard output.
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _load(COCO(), ground_truth)
        if results:
            detections = truth.loadRes([dict(result) for result in results])
        else:
            # `loadRes` fails on an empty list, so load the data set without annotations instead.
            detections = _load(COCO(), {**ground_truth, "annotations": []})
        evaluation = COCOeval(truth, detections, iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
    return Curves(evaluation.eval["precision"], evaluation.eval["recall"])


def _curves_by_class(
    ground_truth: dict[str, Any], results: Mapping[IouType, list[dict[str, Any]]]
) -> dict[IouType, Curves]:
    """Compute curves with faster-coco-eval, in one evaluation per class that has ground truth.

    To save time, each evaluation includes only the images that have ground truth or detections of
    its class.
    """
    # The time of an evaluation is proportional to images x classes. Most classes occur in few
    # images, so these evaluations take less time than one evaluation of all classes.
    classes = len(ground_truth["categories"])
    shape = (10, 101, classes, len(AREAS), len(LIMITS))
    curves = {t: Curves(np.full(shape, -1.0), np.full((10, *shape[2:]), -1.0)) for t in results}
    tasks = list(_class_tasks(ground_truth, results))
    # Begin with the largest tasks, so that all processes end at about the same time.
    tasks.sort(key=lambda task: len(task.detections), reverse=True)
    for task, (precision, recall) in zip(tasks, _class_curves(tasks), strict=True):
        curves[task.iou_type].precision[:, :, task.number] = precision
        curves[task.iou_type].recall[:, task.number] = recall
    return curves


def _class_tasks(
    ground_truth: dict[str, Any], results: Mapping[IouType, list[dict[str, Any]]]
) -> Iterable[_ClassTask]:
    truth = _by_class(ground_truth["annotations"])
    images = {image["id"]: image for image in ground_truth["images"]}
    for iou_type, detections in ((t, _by_class(entries)) for t, entries in results.items()):
        for number, id_ in enumerate(sorted(c["id"] for c in ground_truth["categories"])):
            if truth[id_]:
                used = sorted({entry["image_id"] for entry in (*truth[id_], *detections[id_])})
                yield _ClassTask(
                    iou_type, number, [images[n] for n in used], truth[id_], detections[id_]
                )


def _class_curves(tasks: list[_ClassTask]) -> Iterable[Curves]:
    """Return the precision-recall curves of each task, which is one class of one IoU type."""
    processes = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
    if processes == 1 or sum(len(task.detections) for task in tasks) < _PARALLEL_FROM:
        return map(_curves_of_class, tasks)
    try:
        # Use processes, because threads would wait for the GIL. Fork them, so that they inherit the
        # tasks. A fork is safe although this process may use a GPU, because the forked ones do not.
        with ProcessPoolExecutor(
            processes, get_context("fork"), initializer=_initialise_process, initargs=(tasks,)
        ) as pool:
            return list(pool.map(_curves_of_inherited_task, range(len(tasks))))
    except BrokenProcessPool:
        logger.warning(
            "a process that computes metrics was killed, probably because memory ran out; the "
            "metrics are now computed in one process, which is slower"
        )
        return map(_curves_of_class, tasks)


# Tasks of the forked processes; empty in the main process. Inheriting them saves a copy of all
# detections through a pipe.
_inherited_tasks: list[_ClassTask] = []


def _initialise_process(tasks: list[_ClassTask]) -> None:
    """Initialise a forked process: store the tasks that it inherits from the main process.

    SIGINT and SIGTERM then end the forked process at once, without a traceback.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _inherited_tasks.extend(tasks)


def _curves_of_inherited_task(index: int) -> Curves:
    return _curves_of_class(_inherited_tasks[index])


def _curves_of_class(task: _ClassTask) -> Curves:
    from faster_coco_eval import COCO, COCOeval_faster
    from faster_coco_eval.core import mask as coco_mask

    if task.iou_type == "bbox":
        areas = [result["bbox"][2] * result["bbox"][3] for result in task.detections]
    else:
        areas = coco_mask.area([result["segmentation"] for result in task.detections]).tolist()
    # The library cannot read negative image ids, and adds keys to the ground truth. Pass copies
    # with new image ids.
    numbers = {image["id"]: number for number, image in enumerate(task.images)}
    truth = [{**entry, "image_id": numbers[entry["image_id"]]} for entry in task.truth]
    detected = [
        {**result, "image_id": numbers[result["image_id"]], "id": n, "area": area, "iscrowd": 0}
        for n, (result, area) in enumerate(zip(task.detections, areas, strict=True), start=1)
    ]
    content = {
        "images": [{**image, "id": numbers[image["id"]]} for image in task.images],
        "categories": [{"id": task.truth[0]["category_id"]}],
    }
    both = (_load(COCO(), {**content, "annotations": part}) for part in (truth, detected))
    evaluation = COCOeval_faster(*both, task.iou_type, rle_iou_max_workers=1)
    evaluation.evaluate()
    evaluation.accumulate()
    return Curves(evaluation.eval["precision"][:, :, 0], evaluation.eval["recall"][:, 0])


def _by_class(entries: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for entry in entries:
        groups[entry["category_id"]].append(entry)
    return groups


def _load(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco

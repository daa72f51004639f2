"""Compute COCO's average precision and recall, overall and by class, and format them as text."""

import contextlib
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from ...model.bundle.manifest import Category
from ..config import EvaluatorName
from ..garbage_collection import no_garbage_collection

IouType = Literal["bbox", "segm"]
IOU_TYPES: tuple[IouType, IouType] = ("bbox", "segm")
IOU_TITLES: dict[IouType, str] = {"bbox": "box", "segm": "mask"}


class _Metric(NamedTuple):
    """One of COCO's twelve summary metrics, as indices into the arrays of `_Curves`."""

    name: str
    kind: Literal["Precision", "Recall"]
    # Index of the IoU threshold among 0.50, 0.55, ..., 0.95.
    iou: slice | int
    # Index into `_AREAS`.
    area: int
    # Index into `_LIMITS`.
    limit: int


_ALL = slice(None)
_SUMMARY = (
    _Metric("AP", "Precision", _ALL, 0, 2),
    _Metric("AP50", "Precision", 0, 0, 2),
    _Metric("AP75", "Precision", 5, 0, 2),
    _Metric("APs", "Precision", _ALL, 1, 2),
    _Metric("APm", "Precision", _ALL, 2, 2),
    _Metric("APl", "Precision", _ALL, 3, 2),
    _Metric("AR1", "Recall", _ALL, 0, 0),
    _Metric("AR10", "Recall", _ALL, 0, 1),
    _Metric("AR100", "Recall", _ALL, 0, 2),
    _Metric("ARs", "Recall", _ALL, 1, 2),
    _Metric("ARm", "Recall", _ALL, 2, 2),
    _Metric("ARl", "Recall", _ALL, 3, 2),
)
_AREAS = ("all", "small", "medium", "large")
# Maximum number of detections per image.
_LIMITS = (1, 10, 100)
# With fewer detections, a second process does not pay.
_PARALLEL_FROM = 10_000


class _Curves(NamedTuple):
    """Precision and recall of an evaluation; -1 for classes and areas without ground truth."""

    # Precision at recall 0, 0.01, ..., 1. Axes: IoU, recall, class, area, limit.
    precision: NDArray[np.float64]
    # Final recall. Axes: IoU, class, area, limit.
    recall: NDArray[np.float64]


def box_and_mask_metrics(
    ground_truth: dict[str, Any],
    results: Mapping[IouType, list[dict[str, Any]]],
    categories: Sequence[Category],
    evaluator: EvaluatorName = "faster-coco-eval",
) -> dict[str, float]:
    """Compute COCO metrics of boxes and masks, at the same time if there are many detections.

    Args:
        ground_truth: Parsed COCO annotation file.
        results: Detections in COCO's results format, "bbox" with boxes and "segm" with masks.
        categories: Categories of the ground truth by ascending id.
        evaluator: Library that computes the metrics.

    Returns:
        Metrics of `coco_metrics` for "bbox" and then for "segm".
    """

    def metrics(iou_type: IouType) -> dict[str, float]:
        return coco_metrics(ground_truth, results[iou_type], iou_type, categories, evaluator)

    def send_box_metrics(connection: Connection) -> None:
        connection.send(metrics("bbox"))

    if len(results["bbox"]) < _PARALLEL_FROM:
        return metrics("bbox") | metrics("segm")
    # The libraries hold the GIL. A forked process inherits the detections; it uses no GPU.
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_box_metrics, args=(sender,), daemon=True)
    process.start()
    sender.close()
    mask_metrics = metrics("segm")
    try:
        box_metrics: dict[str, float] = receiver.recv()
    except EOFError:
        # The process has printed its error, or was killed for its memory.
        box_metrics = metrics("bbox")
    process.join()
    return box_metrics | mask_metrics


def coco_metrics(
    ground_truth: dict[str, Any],
    results: list[dict[str, Any]],
    iou_type: IouType,
    categories: Sequence[Category],
    evaluator: EvaluatorName = "faster-coco-eval",
) -> dict[str, float]:
    """Compute COCO metrics of detections.

    Args:
        ground_truth: Parsed COCO annotation file.
        results: Detections in COCO's results format.
        iou_type: "bbox": compare boxes. "segm": compare masks.
        categories: Categories of the ground truth by ascending id.
        evaluator: Library that computes the metrics. All give equal metrics.

    Returns:
        Values in 0..1, or -1 without ground truth, by name: `<iou_type>/` and then AP, AP50, AP75,
        APs, APm, APl (average precision), AR1, AR10, AR100, ARs, ARm, ARl (average recall) or
        AP/<class>.
    """
    curves = None
    if ground_truth["images"]:
        curves = _evaluate(ground_truth, results, iou_type, evaluator)
    metrics = {f"{iou_type}/{metric.name}": _mean(curves, metric) for metric in _SUMMARY}
    for number, category in enumerate(categories):
        name = f"{iou_type}/AP/{category.name}"
        metrics[name] = _mean(curves, _SUMMARY[0], slice(number, number + 1))
    return metrics


def summary_lines(metrics: dict[str, float], iou_type: IouType) -> list[str]:
    """Format metrics as the twelve lines that pycocotools' `summarize` prints."""
    lines = []
    for metric in _SUMMARY:
        title = f"Average {metric.kind}"
        short = f"(A{metric.kind[0]})"
        iou = f"{0.5 + 0.05 * metric.iou:.2f}" if isinstance(metric.iou, int) else "0.50:0.95"
        value = metrics[f"{iou_type}/{metric.name}"]
        lines.append(
            f" {title:<18} {short} @[ IoU={iou:<9} | area={_AREAS[metric.area]:>6s} | "
            f"maxDets={_LIMITS[metric.limit]:>3d} ] = {value:0.3f}"
        )
    return lines


def class_table(metrics: dict[str, float]) -> Table:
    """Return a table of each class's box AP and mask AP."""
    table = Table("class", "box AP", "mask AP")
    prefix = "bbox/AP/"
    for name in (key.removeprefix(prefix) for key in metrics if key.startswith(prefix)):
        table.add_row(Text(name), *(f"{metrics[f'{t}/AP/{name}']:.3f}" for t in IOU_TYPES))
    return table


def _evaluate(
    ground_truth: dict[str, Any],
    results: list[dict[str, Any]],
    iou_type: IouType,
    evaluator: EvaluatorName,
) -> _Curves:
    with no_garbage_collection():
        if evaluator == "pycocotools":
            return _curves_of_pycocotools(ground_truth, results, iou_type)
        return _curves_by_class(ground_truth, results, iou_type)


def _curves_of_pycocotools(
    ground_truth: dict[str, Any], results: list[dict[str, Any]], iou_type: IouType
) -> _Curves:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    # Hide the progress that the library prints to standard output.
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _load(COCO(), ground_truth)
        if results:
            detections = truth.loadRes([dict(result) for result in results])
        else:
            # `loadRes` fails on an empty list.
            detections = _load(COCO(), {**ground_truth, "annotations": []})
        evaluation = COCOeval(truth, detections, iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
    return _Curves(evaluation.eval["precision"], evaluation.eval["recall"])


def _curves_by_class(
    ground_truth: dict[str, Any], results: list[dict[str, Any]], iou_type: IouType
) -> _Curves:
    """Compute the curves of each class with faster-coco-eval, from this class's images only.

    The library's time is proportional to images x classes, but a class is in few images.
    """
    from faster_coco_eval import COCO, COCOeval_faster
    from faster_coco_eval.core import mask as coco_mask

    truth, detections = (_by_class(entries) for entries in (ground_truth["annotations"], results))
    images = {image["id"]: image for image in ground_truth["images"]}
    classes = sorted(category["id"] for category in ground_truth["categories"])
    shape = (10, 101, len(classes), len(_AREAS), len(_LIMITS))
    curves = _Curves(np.full(shape, -1.0), np.full((shape[0], *shape[2:]), -1.0))
    for number, id_ in enumerate(classes):
        if not truth[id_]:
            continue
        if iou_type == "bbox":
            areas = [result["bbox"][2] * result["bbox"][3] for result in detections[id_]]
        else:
            areas = coco_mask.area([result["segmentation"] for result in detections[id_]]).tolist()
        detected = [
            {**result, "id": n, "area": area, "iscrowd": 0}
            for n, (result, area) in enumerate(zip(detections[id_], areas, strict=True), start=1)
        ]
        used = sorted({entry["image_id"] for entry in (*truth[id_], *detected)})
        content = {"images": [images[image_id] for image_id in used], "categories": [{"id": id_}]}
        both = (_load(COCO(), {**content, "annotations": part}) for part in (truth[id_], detected))
        # More threads would only wait for the GIL.
        evaluation = COCOeval_faster(*both, iou_type, rle_iou_max_workers=1)
        evaluation.evaluate()
        evaluation.accumulate()
        curves.precision[:, :, number] = evaluation.eval["precision"][:, :, 0]
        curves.recall[:, number] = evaluation.eval["recall"][:, 0]
    return curves


def _by_class(entries: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for entry in entries:
        groups[entry["category_id"]].append(entry)
    return groups


def _load(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco


def _mean(curves: _Curves | None, metric: _Metric, classes: slice = _ALL) -> float:
    # None: no image was evaluated.
    if curves is None:
        return -1.0
    values = curves.precision if metric.kind == "Precision" else curves.recall
    part = values[metric.iou, ..., classes, metric.area, metric.limit]
    # -1 marks classes and areas without ground truth.
    known = part[part > -1]
    return float(known.mean()) if known.size else -1.0

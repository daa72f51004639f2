"""Compute COCO's average precision and recall, overall and by class, and format them as text."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from ...model.bundle.manifest import Category
from ..config import EvaluatorName

IouType = Literal["bbox", "segm"]
IOU_TYPES: tuple[IouType, IouType] = ("bbox", "segm")
IOU_TITLES: dict[IouType, str] = {"bbox": "box", "segm": "mask"}


class _Metric(NamedTuple):
    """One of COCO's twelve summary metrics, as indices into `COCOeval.eval`'s arrays."""

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


def coco_metrics(
    ground_truth: dict[str, Any],
    results: list[dict[str, Any]],
    iou_type: IouType,
    categories: Sequence[Category],
    evaluator: EvaluatorName = "pycocotools",
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
    evaluation = None
    if ground_truth["images"]:
        evaluation = _evaluate(ground_truth, results, iou_type, evaluator)
    metrics = {f"{iou_type}/{metric.name}": _mean(evaluation, metric) for metric in _SUMMARY}
    for number, category in enumerate(categories):
        name = f"{iou_type}/AP/{category.name}"
        metrics[name] = _mean(evaluation, _SUMMARY[0], slice(number, number + 1))
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
) -> Any:
    new_index, new_evaluation = _evaluator_classes(evaluator)
    # Hide the progress that the libraries print to standard output.
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _load(new_index(), ground_truth)
        if results:
            detections = truth.loadRes([dict(result) for result in results])
        else:
            # `loadRes` fails on an empty list.
            detections = _load(new_index(), {**ground_truth, "annotations": []})
        evaluation = new_evaluation(truth, detections, iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _evaluator_classes(evaluator: EvaluatorName) -> tuple[Any, Any]:
    # `COCO` and `COCOeval` of the chosen library. Both libraries have the same API.
    if evaluator == "faster-coco-eval":
        from faster_coco_eval import COCO, COCOeval_faster

        return COCO, COCOeval_faster
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return COCO, COCOeval


def _load(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco


def _mean(evaluation: Any, metric: _Metric, classes: slice = _ALL) -> float:
    # None: no image was evaluated.
    if evaluation is None:
        return -1.0
    # Axes of "precision": IoU, recall, class, area, limit; of "recall": IoU, class, area, limit.
    values: NDArray[np.float64] = evaluation.eval[metric.kind.lower()]
    part = values[metric.iou, ..., classes, metric.area, metric.limit]
    # -1 marks classes and areas without ground truth.
    known = part[part > -1]
    return float(known.mean()) if known.size else -1.0

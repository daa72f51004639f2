"""Compute average precision and recall from COCO's curves, and format them as text."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from ...model.bundle.manifest import Category
from ..config import EvaluatorName
from .coco_curves import AREAS, IOU_TYPES, LIMITS, Curves, IouType, coco_curves

IOU_TITLES: dict[IouType, str] = {"bbox": "box", "segm": "mask"}


class _Metric(NamedTuple):
    """One of COCO's twelve summary metrics, as indices into the arrays of `Curves`."""

    name: str
    kind: Literal["Precision", "Recall"]
    # Index of the IoU threshold among 0.50, 0.55, ..., 0.95. A slice: the mean over thresholds.
    iou: slice | int
    # Index into `AREAS`.
    area: int
    # Index into `LIMITS`.
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


def coco_metrics(
    ground_truth: dict[str, Any],
    results: Mapping[IouType, list[dict[str, Any]]],
    categories: Sequence[Category],
    evaluator: EvaluatorName = "faster-coco-eval",
) -> dict[str, float]:
    """Compute COCO metrics of detections.

    Args:
        ground_truth: Parsed COCO annotation file.
        results: Detections in COCO's results format, by kind of IoU: `bbox` (box IoU) or `segm`
            (mask IoU).
        categories: Categories of the ground truth, in ascending order of their ids.
        evaluator: Library that computes the metrics. Both libraries give equal metrics.

    Returns:
        Values in 0..1 by name. -1: there is no ground truth. Names are `<iou_type>/` followed by
        AP, AP50, AP75, APs, APm, APl (average precision), AR1, AR10, AR100, ARs, ARm, ARl
        (average recall) or AP/<class>.
    """
    curves: dict[IouType, Curves] = {}
    if ground_truth["images"]:
        curves = coco_curves(ground_truth, results, evaluator)
    metrics: dict[str, float] = {}
    for iou_type in results:
        own = curves.get(iou_type)
        metrics |= {f"{iou_type}/{metric.name}": _mean(own, metric) for metric in _SUMMARY}
        for number, category in enumerate(categories):
            name = f"{iou_type}/AP/{category.name}"
            metrics[name] = _mean(own, _SUMMARY[0], slice(number, number + 1))
    return metrics


def summary_lines(metrics: dict[str, float], iou_type: IouType) -> list[str]:
    """Format box or mask metrics as the twelve lines that pycocotools' `summarize` prints."""
    lines = []
    for metric in _SUMMARY:
        title = f"Average {metric.kind}"
        short = f"(A{metric.kind[0]})"
        iou = f"{0.5 + 0.05 * metric.iou:.2f}" if isinstance(metric.iou, int) else "0.50:0.95"
        value = metrics[f"{iou_type}/{metric.name}"]
        lines.append(
            f" {title:<18} {short} @[ IoU={iou:<9} | area={AREAS[metric.area]:>6s} | "
            f"maxDets={LIMITS[metric.limit]:>3d} ] = {value:0.3f}"
        )
    return lines


def metric_text(value: float | None) -> str:
    """Format a metric. `-` means that it was not computed, or that there is no ground truth."""
    return "-" if value is None or value < 0 else f"{value:.3f}"


def class_table(metrics: dict[str, float]) -> Table:
    """Return a table of each class's box AP and mask AP."""
    table = Table("class", "box AP", "mask AP")
    prefix = "bbox/AP/"
    for name in (key.removeprefix(prefix) for key in metrics if key.startswith(prefix)):
        table.add_row(Text(name), *(metric_text(metrics[f"{t}/AP/{name}"]) for t in IOU_TYPES))
    return table


def _mean(curves: Curves | None, metric: _Metric, classes: slice = _ALL) -> float:
    # None: no image was evaluated.
    if curves is None:
        return -1.0
    values = curves.precision if metric.kind == "Precision" else curves.recall
    part = values[metric.iou, ..., classes, metric.area, metric.limit]
    # -1 marks classes and areas without ground truth.
    known = part[part > -1]
    return float(known.mean()) if known.size else -1.0

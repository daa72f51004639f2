"""COCO's metrics: average precision and recall, in all and by class, and how they are printed."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from ..model.manifest import Category
from .config import EvaluatorName

IouType = Literal["bbox", "segm"]
IOU_TYPES: tuple[IouType, IouType] = ("bbox", "segm")
IOU_TITLES: dict[IouType, str] = {"bbox": "box", "segm": "mask"}


class _Row(NamedTuple):
    """A line of COCO's summary."""

    name: str
    kind: Literal["Precision", "Recall"]
    iou: slice | int
    """Where among the thresholds 0.50, 0.55, ..., 0.95."""
    area: int
    """Which of all, small, medium, large."""
    limit: int
    """Which of 1, 10, 100 detections an image."""


_ALL = slice(None)
_SUMMARY = (
    _Row("AP", "Precision", _ALL, 0, 2),
    _Row("AP50", "Precision", 0, 0, 2),
    _Row("AP75", "Precision", 5, 0, 2),
    _Row("APs", "Precision", _ALL, 1, 2),
    _Row("APm", "Precision", _ALL, 2, 2),
    _Row("APl", "Precision", _ALL, 3, 2),
    _Row("AR1", "Recall", _ALL, 0, 0),
    _Row("AR10", "Recall", _ALL, 0, 1),
    _Row("AR100", "Recall", _ALL, 0, 2),
    _Row("ARs", "Recall", _ALL, 1, 2),
    _Row("ARm", "Recall", _ALL, 2, 2),
    _Row("ARl", "Recall", _ALL, 3, 2),
)
_AREAS = ("all", "small", "medium", "large")
_LIMITS = (1, 10, 100)


def coco_metrics(
    ground_truth: dict[str, Any],
    results: list[dict[str, Any]],
    iou_type: IouType,
    categories: Sequence[Category],
    evaluator: EvaluatorName = "pycocotools",
) -> dict[str, float]:
    """Metrics of detections, as COCO defines them.

    Args:
        ground_truth: content of a COCO file.
        results: detections in COCO's results format.
        iou_type: whether boxes or masks are compared.
        categories: classes by ascending id, those of the ground truth.
        evaluator: what computes them; the numbers are the same.

    Returns:
        After `bbox/` or `segm/`: the average precisions AP, AP50, AP75, APs, APm, APl, the average
        recalls AR1, AR10, AR100, ARs, ARm, ARl, and AP/<name> for every class; from 0 to 1, or -1
        where there is no ground truth to be found.
    """
    evaluation = None
    if ground_truth["images"]:
        evaluation = _evaluated(ground_truth, results, iou_type, evaluator)
    metrics = {f"{iou_type}/{row.name}": _mean(evaluation, row) for row in _SUMMARY}
    for number, category in enumerate(categories):
        name = f"{iou_type}/AP/{category.name}"
        metrics[name] = _mean(evaluation, _SUMMARY[0], slice(number, number + 1))
    return metrics


def summary_lines(metrics: dict[str, float], iou_type: IouType) -> list[str]:
    """The twelve lines that COCO's evaluation prints."""
    lines = []
    for row in _SUMMARY:
        title = f"Average {row.kind}"
        short = f"(A{row.kind[0]})"
        iou = f"{0.5 + 0.05 * row.iou:.2f}" if isinstance(row.iou, int) else "0.50:0.95"
        value = metrics[f"{iou_type}/{row.name}"]
        lines.append(
            f" {title:<18} {short} @[ IoU={iou:<9} | area={_AREAS[row.area]:>6s} | "
            f"maxDets={_LIMITS[row.limit]:>3d} ] = {value:0.3f}"
        )
    return lines


def class_table(metrics: dict[str, float]) -> Table:
    """Average precision of boxes and masks by class."""
    table = Table("class", "box AP", "mask AP")
    prefix = "bbox/AP/"
    for name in (key.removeprefix(prefix) for key in metrics if key.startswith(prefix)):
        table.add_row(Text(name), *(f"{metrics[f'{t}/AP/{name}']:.3f}" for t in IOU_TYPES))
    return table


def _evaluated(
    ground_truth: dict[str, Any],
    results: list[dict[str, Any]],
    iou_type: IouType,
    evaluator: EvaluatorName,
) -> Any:
    index, evaluate = _tools(evaluator)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _indexed(index(), ground_truth)
        if results:
            found = truth.loadRes([dict(result) for result in results])
        else:
            found = _indexed(index(), {**ground_truth, "annotations": []})
        evaluation = evaluate(truth, found, iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _tools(evaluator: EvaluatorName) -> tuple[Any, Any]:
    """Index and evaluation, whose members have the same names in both."""
    if evaluator == "faster-coco-eval":
        from faster_coco_eval import COCO, COCOeval_faster

        return COCO, COCOeval_faster
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return COCO, COCOeval


def _indexed(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco


def _mean(evaluation: Any, row: _Row, classes: slice = _ALL) -> float:
    if evaluation is None:  # there are no images
        return -1.0
    # Precision by IoU, recall, class, area and limit; recall by IoU, class, area and limit.
    values: NDArray[np.float64] = evaluation.eval[row.kind.lower()]
    part = values[row.iou, ..., classes, row.area, row.limit]
    known = part[part > -1]
    return float(known.mean()) if known.size else -1.0

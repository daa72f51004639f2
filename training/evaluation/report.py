"""HTML report of an evaluation: precision-recall curves, confusion matrix, worst images."""

import base64
import html
import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ...model.atomic_files import atomic_write
from ...model.plurals import counted
from ..data.coco.dataset import CocoDataset
from ..data.inspect.sample_grid import class_name_fonts, drawable
from .coco_curves import IOU_TYPES
from .coco_metrics import IOU_TITLES, metric_text
from .matching import ClassCurve, class_curves, confusion_matrix, matched_images
from .worst_images import draw_worst_images

# With more classes, the curves have no legend, and the cells of the matrix have no counts.
_MAX_LABELS = 20
# Longer class names are shortened in the figures, because they would leave no room for the data.
_MAX_NAME = 30
_STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% }
"""


def write_report(
    path: Path,
    dataset: CocoDataset,
    results: Iterable[Mapping[str, Any]],
    metrics: Mapping[str, float],
    image_ids: set[int],
) -> None:
    """Write the report of an evaluation as one HTML file with embedded images.

    Args:
        path: File to write. Its folder is created if it does not exist.
        dataset: Data set with the ground truth.
        results: Detections with masks in COCO's results format.
        metrics: Metrics by name; empty if they were not computed.
        image_ids: Ids of the evaluated images.
    """
    images = matched_images(dataset, results, image_ids)
    names = [category.name for category in dataset.categories]
    drawn_names = [
        drawable(name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…") for name in names
    ]
    curves = class_curves(images, len(names))
    thresholds = [curve.best_threshold for curve in curves]
    confusion = confusion_matrix(images, thresholds)
    with tempfile.TemporaryDirectory() as folder:
        worst = Path(folder) / "worst.png"
        drawn = draw_worst_images(images, dataset.categories, thresholds, worst)
        worst_image = _image(worst.read_bytes(), "Ground truth and detections") if drawn else ""
    counts = (
        counted(len(images), "image"),
        counted(sum(curve.objects for curve in curves), "object"),
        counted(len(names), "class", "classes"),
    )
    body = f"""
<h1>Evaluation of {html.escape(dataset.name)}</h1>
<p>{", ".join(counts)}</p>
{_summary_table(metrics)}
<h2>Classes</h2>
<p>A detection is correct if its mask has an IoU of at least 0.5 with an object of its class.
The best threshold of a class is the minimum score that gives the highest F1.</p>
{_class_table(names, curves, metrics)}
<h2>Precision and recall</h2>
{_image(_curves_figure(drawn_names, curves), "Precision-recall curves")}
<h2>Confusion matrix</h2>
<p>Detections with a score of at least the best threshold of their class. Rows: classes of objects;
columns: classes of detections.</p>
{_image(_confusion_figure(drawn_names, confusion), "Confusion matrix")}
<h2>Images with the most errors</h2>
{worst_image or "<p>No image has an error.</p>"}
"""
    page = f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Evaluation</title><style>{_STYLE}</style></head>
<body>{body}</body>
</html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(drawable(page).encode())


def _summary_table(metrics: Mapping[str, float]) -> str:
    keys = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR100")
    rows = [
        [IOU_TITLES[iou_type], *(metric_text(metrics.get(f"{iou_type}/{key}")) for key in keys)]
        for iou_type in IOU_TYPES
    ]
    return _table(("", *keys), rows) if metrics else ""


def _class_table(
    names: Sequence[str], curves: Sequence[ClassCurve], metrics: Mapping[str, float]
) -> str:
    titles = (
        "class",
        "objects",
        "box AP",
        "mask AP",
        "best threshold",
        "precision",
        "recall",
        "F1",
    )
    rows = []
    for name, curve in zip(names, curves, strict=True):
        row = [name, str(curve.objects)]
        row += [metric_text(metrics.get(f"{iou_type}/AP/{name}")) for iou_type in IOU_TYPES]
        best = curve.best
        arrays = (curve.scores, curve.precision, curve.recall, curve.f1)
        row += [metric_text(None if best is None else float(values[best])) for values in arrays]
        rows.append(row)
    return _table(titles, rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(title)}</th>" for title in titles)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


@class_name_fonts()
def _curves_figure(names: Sequence[str], curves: Sequence[ClassCurve]) -> bytes:
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    recall, scores = figure.subplots(1, 2)
    shown = [(name, curve) for name, curve in zip(names, curves, strict=True) if curve.objects]
    for _, curve in shown:
        recall.plot(curve.recall, curve.precision)
        scores.plot(curve.scores, curve.f1)
    limits = {"xlim": (0, 1), "ylim": (0, 1.02)}
    recall.set(xlabel="recall", ylabel="precision", **limits)
    scores.set(xlabel="minimum score", ylabel="F1", **limits)
    if 0 < len(shown) <= _MAX_LABELS:
        # Print class names as they are: matplotlib would read dollar signs in them as formulas.
        for text in recall.legend(recall.lines, [name for name, _ in shown], fontsize=7).texts:
            text.set_parse_math(False)
    return _png(figure)


@class_name_fonts()
def _confusion_figure(names: Sequence[str], counts: NDArray[np.int64]) -> bytes:
    side = min(4 + 0.35 * len(counts), 24)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    # Colour each cell by its share of the sum of its row.
    axes.imshow(
        counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1
    )
    ticks = range(len(counts))
    axes.set_xticks(ticks, [*names, "missed"], rotation=90, parse_math=False)
    axes.set_yticks(ticks, [*names, "no object"], parse_math=False)
    axes.set(xlabel="detected as", ylabel="object")
    if len(names) <= _MAX_LABELS:
        for (row, column), count in np.ndenumerate(counts):
            axes.text(
                column, row, str(count), ha="center", va="center", fontsize=8, color="tab:red"
            )
    return _png(figure)


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()


def _image(png: bytes, description: str) -> str:
    encoded = base64.b64encode(png).decode()
    return f'<img alt="{description}" src="data:image/png;base64,{encoded}">'

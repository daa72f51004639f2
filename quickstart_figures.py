"""Pictures of a quickstart: how the losses fell, and what was found beside what is there."""

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from .model.images import decode_image, resize_image
from .model.losses import LOSS_NAMES
from .model.masks import mask_from_rle, rle_from_mask
from .serving.detections import Detections
from .serving.results.drawing import draw_detections
from .training.data.coco import CocoDataset, ImageRecord
from .training.data.instances import draw_mask

mpl.use("Agg")
from matplotlib import pyplot as plt

_ROWS = 4
_ENLARGEMENT = 3
_CONFIDENT = 0.5


def plot_losses(records: Path, picture: Path) -> None:
    """Draw the losses in a run's JSON lines over its iterations, into a PNG."""
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name in ("loss", *LOSS_NAMES):
        style = {"linewidth": 2.0, "color": "black"} if name == "loss" else {"linewidth": 1.2}
        axes.plot([r["iteration"] for r in rows], [r[name] for r in rows], label=name, **style)
    axes.set(xlabel="iteration", ylabel="loss, mean of a logging period", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def draw_comparison(dataset: CocoDataset, found: Sequence[Detections], picture: Path) -> None:
    """Draw ground truth and confident detections of the fullest images side by side, into a PNG.

    Args:
        dataset: the images.
        found: detections of its first images, in source pixels.
        picture: file to write.
    """
    pairs = zip(dataset.records, found, strict=False)
    fullest = sorted(pairs, key=lambda pair: -len(pair[0].objects))[: 2 * _ROWS]
    figure, axes = plt.subplots(_ROWS, 4, figsize=(16, 3.2 * _ROWS), layout="constrained")
    cells = iter(axes.flat)
    for record, detections in fullest:
        image = decode_image(record.path.read_bytes())
        enlarged = resize_image(image, _ENLARGEMENT * record.height, _ENLARGEMENT * record.width)
        truth = _truth_of(record, dataset)
        for title, shown in (("ground truth", truth), ("prediction", _confident(detections))):
            cell = next(cells, None)
            if cell is not None:
                cell.imshow(draw_detections(enlarged, shown))
                cell.set_title(title, fontsize=10)
    for cell in axes.flat:
        cell.axis("off")
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def _truth_of(record: ImageRecord, dataset: CocoDataset) -> Detections:
    """The annotated objects of an enlarged image, as if each had been detected for certain."""
    size = (_ENLARGEMENT * record.height, _ENLARGEMENT * record.width)
    masks = [
        draw_mask(instance.segmentation, (record.height, record.width), size)
        for instance in record.objects
    ]
    boxes = [instance.clipped_box(record.height, record.width) for instance in record.objects]
    return _detections_from(
        np.array(boxes, np.float32).reshape(-1, 4) * _ENLARGEMENT,
        np.ones(len(masks), np.float32),
        np.array([instance.label for instance in record.objects], np.int64),
        [dataset.categories[instance.label - 1].name for instance in record.objects],
        masks,
        size,
    )


def _confident(detections: Detections) -> Detections:
    """The detections that are more likely right than wrong, enlarged."""
    chosen = np.flatnonzero(detections.scores > _CONFIDENT)
    size = (_ENLARGEMENT * detections.height, _ENLARGEMENT * detections.width)
    rles = detections.rles or ()
    masks = [
        np.kron(mask_from_rle(rles[i]), np.ones((_ENLARGEMENT,) * 2, np.uint8)) for i in chosen
    ]
    return _detections_from(
        detections.boxes[chosen] * _ENLARGEMENT,
        detections.scores[chosen],
        detections.labels[chosen],
        [detections.class_names[i] for i in chosen],
        masks,
        size,
    )


def _detections_from(
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    labels: NDArray[np.int64],
    names: Sequence[str],
    masks: Sequence[NDArray[np.uint8]],
    size: tuple[int, int],
) -> Detections:
    return Detections(
        height=size[0],
        width=size[1],
        boxes=boxes,
        scores=scores,
        labels=labels,
        category_ids=labels,
        class_names=tuple(names),
        rles=tuple(map(rle_from_mask, masks)),
    )

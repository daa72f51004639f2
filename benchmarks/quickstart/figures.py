"""Figure of a quickstart: predictions beside ground truth."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np

from ...model.image_decoding import decode_image
from ...model.masks import mask_from_rle, rle_from_mask
from ...model.resizing import resize_image
from ...serving.detections import Detections
from ...serving.results.drawing import draw_detections
from ...training.data.coco.dataset import CocoDataset, ImageRecord
from ...training.data.coco.segmentation_masks import mask_from_segmentation

mpl.use("Agg")
from matplotlib import pyplot as plt

# Rows of image pairs, two pairs per row.
_ROWS = 4
# Factor by which images are enlarged, so that labels are readable.
_ENLARGEMENT = 3
# Minimum score of a drawn detection.
_MIN_SCORE = 0.5


def draw_comparison(dataset: CocoDataset, predictions: Sequence[Detections], image: Path) -> None:
    """Draw ground truth beside predictions.

    Of the images that have predictions, those with the most annotated objects are drawn.

    Args:
        dataset: Images and annotations.
        predictions: Detections in the first images of the data set, one item per image, in pixels
            of the source image.
        image: PNG file to write.
    """
    pairs = zip(dataset.records, predictions, strict=False)
    chosen = sorted(pairs, key=lambda pair: -len(pair[0].objects))[: 2 * _ROWS]
    figure, axes = plt.subplots(_ROWS, 4, figsize=(16, 3.2 * _ROWS), layout="constrained")
    cells = iter(axes.flat)
    for record, detections in chosen:
        pixels = decode_image(record.path.read_bytes())
        enlarged = resize_image(pixels, _ENLARGEMENT * record.height, _ENLARGEMENT * record.width)
        truth = _ground_truth_of(record, dataset)
        for title, shown in (("ground truth", truth), ("prediction", _enlarged(detections))):
            cell = next(cells, None)
            if cell is not None:
                cell.imshow(draw_detections(enlarged, shown))
                cell.set_title(title, fontsize=10)
    for cell in axes.flat:
        cell.axis("off")
    figure.savefig(image, dpi=100)
    plt.close(figure)


def _ground_truth_of(record: ImageRecord, dataset: CocoDataset) -> Detections:
    """Return an image's annotations as detections of score 1.

    Boxes and masks are in pixels of the drawn image, whose sides are `_ENLARGEMENT` times as long.
    """
    size = (_ENLARGEMENT * record.height, _ENLARGEMENT * record.width)
    masks = [
        mask_from_segmentation(instance.segmentation, (record.height, record.width), size)
        for instance in record.objects
    ]
    boxes = [instance.clipped_box(record.height, record.width) for instance in record.objects]
    labels = np.array([instance.label for instance in record.objects], np.int64)
    return Detections(
        height=size[0],
        width=size[1],
        boxes=np.array(boxes, np.float32).reshape(-1, 4) * _ENLARGEMENT,
        scores=np.ones(len(masks), np.float32),
        labels=labels,
        category_ids=labels,
        class_names=tuple(dataset.categories[label - 1].name for label in labels),
        rles=tuple(map(rle_from_mask, masks)),
    )


def _enlarged(detections: Detections) -> Detections:
    """Return the detections with scores above `_MIN_SCORE`, scaled to the enlarged image."""
    indices = np.flatnonzero(detections.scores > _MIN_SCORE)
    rles = detections.rles or ()
    masks = [
        np.kron(mask_from_rle(rles[i]), np.ones((_ENLARGEMENT,) * 2, np.uint8)) for i in indices
    ]
    return replace(
        detections,
        height=_ENLARGEMENT * detections.height,
        width=_ENLARGEMENT * detections.width,
        boxes=detections.boxes[indices] * _ENLARGEMENT,
        scores=detections.scores[indices],
        labels=detections.labels[indices],
        category_ids=detections.category_ids[indices],
        class_names=tuple(detections.class_names[i] for i in indices),
        rles=tuple(map(rle_from_mask, masks)),
    )

"""Draw the same validation images after each evaluation, with ground truth and detections."""

from collections.abc import Iterable, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from ..data.coco.dataset import CocoDataset, ImageRecord
from ..data.inspect.sample_grid import GridSample, draw_samples
from .matching import DEFAULT_THRESHOLD, matched_images


def draw_validation_images(
    dataset: CocoDataset, results: Iterable[Mapping[str, Any]], count: int, path: Path
) -> None:
    """Draw images of a validation set: ground truth, and beside it the detections from 0.5 up.

    Args:
        dataset: Validation set. The images are chosen at equal distances, those with objects first.
        results: Detections with masks in COCO's results format.
        count: Maximum number of images.
        path: PNG file to write. Its folder is created if it does not exist.
    """
    records = [record for record in dataset.records if record.objects] or list(dataset.records)
    chosen = {record.id for record in records[:: -(-len(records) // count)]}
    samples = []
    for image in matched_images(dataset, results, chosen):
        record = image.record
        shown = tuple(compress(image.detections, image.scores >= DEFAULT_THRESHOLD))
        detected = ImageRecord(record.id, record.path, record.height, record.width, shown)
        samples += [GridSample(r, dataset.categories) for r in (record, detected)]
    draw_samples(samples, path)

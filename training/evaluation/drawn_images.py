"""Write PNG files that show ground truth and detections of the same images during a run."""

import copy
from collections.abc import Iterable, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from PIL import Image

from ...model.atomic_files import atomic_write
from ..data.coco.dataset import CocoDataset
from ..data.inspect.sample_grid import compared_samples, draw_samples
from .matching import DEFAULT_THRESHOLD, matched_images


def chosen_images(dataset: CocoDataset, count: int) -> CocoDataset:
    """Return a data set of at most `count` images of `dataset`, evenly spaced in the order of ids.

    Images without objects are chosen only if no image has objects.
    """
    records = [record for record in dataset.records if record.objects] or list(dataset.records)
    chosen = copy.copy(dataset)
    count = min(count, len(records))
    chosen.records = tuple(records[n * len(records) // count] for n in range(count))
    return chosen


def draw_detections(
    dataset: CocoDataset, results: Iterable[Mapping[str, Any]], title: str, path: Path
) -> None:
    """Write a PNG file that shows each image with its ground truth, and again with detections.

    Only detections with a score of at least 0.5 are shown.

    Args:
        dataset: Images with ground truth.
        results: Detections with masks in COCO's results format.
        title: Text above each image with detections. The image's file name follows it.
        path: PNG file to write. Its folder is created if it does not exist.
    """
    samples = []
    for image in matched_images(dataset, results):
        shown = tuple(compress(image.detections, image.scores >= DEFAULT_THRESHOLD))
        samples += compared_samples(image.record, shown, dataset.categories, title)
    draw_samples(samples, path)


def join_drawings(paths: Iterable[Path], image: Path) -> None:
    """Stack the image files `paths` from top to bottom, and write them as one PNG file, `image`.

    Missing files are skipped.
    """
    drawings = [Image.open(path) for path in paths if path.exists()]
    size = max(d.width for d in drawings), sum(d.height for d in drawings)
    joined, top = Image.new("RGB", size, "white"), 0
    for drawing in drawings:
        joined.paste(drawing, (0, top))
        top += drawing.height
    with atomic_write(image) as file:
        joined.save(file, "PNG")

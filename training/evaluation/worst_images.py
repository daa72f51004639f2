"""Show the images with the most errors in a PNG file: ground truth beside detections."""

from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from ...model.bundle.manifest import Category
from ..data.coco.annotations import Instance
from ..data.coco.dataset import ImageRecord
from ..data.inspect.sample_grid import compared_samples, draw_samples
from .matching import MatchedImage

# Maximum number of images in the PNG file. Each appears with ground truth and with detections.
_MAX_IMAGES = 8


class ImageErrors(NamedTuple):
    """Detections of one image, and numbers of missed objects and wrong detections."""

    record: ImageRecord
    # Detections with a score of at least the threshold of their class.
    detections: tuple[Instance, ...]
    # Number of objects without a detection of their class.
    missed: int
    # Number of detections without an object of their class.
    wrong: int


def draw_worst_images(
    images: Iterable[MatchedImage],
    categories: tuple[Category, ...],
    thresholds: Sequence[float],
    path: Path,
) -> bool:
    """Write a PNG file that shows the images with the most errors. Return whether it was written.

    Args:
        images: Matched detections.
        categories: Classes by label; label 1 is the first.
        thresholds: Minimum score of the detections of each class, in the order of the labels.
        path: PNG file to write. It is not written if no image has an error.
    """
    errors = [errors_of(image, thresholds) for image in images]
    errors = [entry for entry in errors if entry.missed + entry.wrong]
    errors.sort(key=lambda entry: -(entry.missed + entry.wrong))
    samples = []
    for record, detections, missed, wrong in errors[:_MAX_IMAGES]:
        title = f"detected: {missed} missed, {wrong} wrong"
        samples += compared_samples(record, detections, categories, title)
    if samples:
        draw_samples(samples, path)
    return bool(samples)


def errors_of(image: MatchedImage, thresholds: Sequence[float]) -> ImageErrors:
    """Count the missed objects and the wrong detections of an image.

    Only detections with a score of at least the threshold of their class are used. `thresholds` has
    one value per class, in the order of the labels.
    """
    kept = image.above(thresholds)
    correct = int((kept & image.correct).sum())
    wrong = int((kept & (image.matches < 0)).sum())
    detections = tuple(compress(image.detections, kept))
    return ImageErrors(image.record, detections, len(image.record.objects) - correct, wrong)

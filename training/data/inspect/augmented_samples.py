"""Choose sample images, and resize and augment them as in training."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ....model.image_limits import ImageError
from ....model.masks import rle_from_mask
from ...config import DataConfig
from ..coco.annotations import Instance
from ..coco.dataset import CocoDataset, DataError, ImageRecord
from ..loading.batch_reader import BatchReader
from ..loading.batches import Sample
from .sample_grid import GridSample


def augmented_samples(
    dataset: CocoDataset, config: DataConfig, count: int, seed: int
) -> list[GridSample]:
    """Return random images with their objects, resized and augmented as in training.

    Unreadable images are replaced by other random images.

    Args:
        dataset: Training images.
        config: Section `data` of the training configuration.
        count: Maximum number of samples.
        seed: Seed of the random choices.

    Raises:
        DataError: No image can be read, or no image has objects and `data.keep_empty` is False.
    """
    reader = BatchReader(
        dataset, config.model_copy(update={"decode": "workers"}), seed, training=True
    )
    order = np.random.default_rng(seed).permutation(len(reader.records)).tolist()
    errors: list[ImageError] = []

    def samples() -> Iterator[GridSample]:
        for position, index in enumerate(order):
            try:
                sample = reader.read(index, position=position)
            except ImageError as error:
                errors.append(error)
                continue
            yield _grid_sample(sample, reader.records[index], dataset)

    chosen = list(islice(samples(), count))
    if not chosen:
        raise DataError(
            f"{dataset.name} lists no readable image to augment; the first unreadable file is "
            f"{errors[0]}"
        )
    return chosen


def _grid_sample(sample: Sample, record: ImageRecord, dataset: CocoDataset) -> GridSample:
    parts = zip(sample.labels.tolist(), sample.boxes.tolist(), sample.masks, strict=True)
    instances = tuple(
        Instance(
            annotation_id=number,
            label=label,
            bbox=(left, top, right - left, bottom - top),
            area=float(mask.sum()),
            is_crowd=False,
            segmentation=rle_from_mask(mask),
        )
        for number, (label, (left, top, right, bottom), mask) in enumerate(parts)
    )
    augmented = ImageRecord(record.id, record.path, *sample.size, instances)
    pixels = np.array(sample.image).astype(np.uint8)
    return GridSample(augmented, dataset.categories, image=pixels)

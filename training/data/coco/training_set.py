"""Training set of a run: `data.train` and the sets of `data.extra_train`."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from ...config import DataConfig
from .dataset import CocoDataset, DataError, ImageRecord

logger = logging.getLogger(__name__)


def load_training_set(config: DataConfig) -> CocoDataset:
    """Read `data.train` and `data.extra_train` into one data set.

    In all sets, a category gets the label that it has in `data.train`. If training leaves out
    images without objects, their number is logged.

    Raises:
        DataError: A set is missing or invalid, or has a category that `data.train` lacks.
    """
    dataset = CocoDataset(config.train, config.on_broken)
    labels = {category: n for n, category in enumerate(dataset.categories, start=1)}
    for extra in config.extra_train:
        other = CocoDataset(extra, config.on_broken)
        unknown = [category for category in other.categories if category not in labels]
        if unknown:
            raise DataError(
                f"{other.name} has category {unknown[0].id} {unknown[0].name!r}, which "
                f"{dataset.name} lacks; join the files by class names with `maskrcnn data merge`"
            )
        new_labels = [labels[category] for category in other.categories]
        dataset.records += tuple(
            replace(relabelled(record, new_labels), weight=extra.weight) for record in other.records
        )
    empty = sum(not record.objects for record in dataset.records)
    if empty and not config.keep_empty:
        logger.info("%s", left_out_message(empty))
    return dataset


def left_out_message(empty: int) -> str:
    """Return the message that training leaves out `empty` images without objects."""
    return (
        f"images without objects are left out: {empty} (to train on them, set data.keep_empty=true)"
    )


def relabelled(record: ImageRecord, new_labels: Sequence[int]) -> ImageRecord:
    """Return a copy of an image record with each label n replaced by `new_labels[n - 1]`."""
    instances = tuple(replace(i, label=new_labels[i.label - 1]) for i in record.instances)
    return replace(record, instances=instances)

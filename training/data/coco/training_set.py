"""Training set of a run: `data.train` and the sets of `data.extra_train`."""

from dataclasses import replace

from ...config import DataConfig
from .dataset import CocoDataset, DataError, ImageRecord


def load_training_set(config: DataConfig) -> CocoDataset:
    """Read `data.train` and `data.extra_train` into one data set.

    In all sets, a category gets the label that it has in `data.train`.

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
            _relabelled(record, new_labels, extra.weight) for record in other.records
        )
    return dataset


def _relabelled(record: ImageRecord, labels: list[int], weight: float) -> ImageRecord:
    instances = tuple(replace(i, label=labels[i.label - 1]) for i in record.instances)
    return replace(record, instances=instances, weight=weight)

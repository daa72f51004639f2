"""The classes of a model and those of the data it meets."""

from collections.abc import Sequence

from ..model.manifest import Category
from .config import ConfigError, TrainConfig
from .data.coco import CocoDataset


def with_classes_of(dataset: CocoDataset, config: TrainConfig) -> TrainConfig:
    """The configuration with the number of classes of the data.

    Raises:
        ConfigError: the configuration names another number.
    """
    count, model = len(dataset.categories), config.model
    if "num_classes" in model.model_fields_set and model.num_classes != count:
        raise ConfigError(
            f"model.num_classes is {model.num_classes}, but {dataset.name} has {count} "
            f"categories; set model.num_classes={count}, or leave it out"
        )
    return config.model_copy(update={"model": model.model_copy(update={"num_classes": count})})


def check_categories(dataset: CocoDataset, known: Sequence[Category]) -> None:
    """Make sure that a model knows every category of a data set, under the same id and name.

    Args:
        dataset: what the model is to be measured on; it may lack some of the categories.
        known: the model's classes; label 1 is the first.

    Raises:
        ConfigError: it does not; the message names the first that differs.
    """
    names = {category.id: category.name for category in known}
    for id_, name in ((category.id, category.name) for category in dataset.categories):
        if names.get(id_) != name:
            other = f"as {names[id_]!r}" if id_ in names else "not at all"
            raise ConfigError(
                f"{dataset.name} has category {id_} {name!r}, which the model knows {other}; give "
                "the validation set the ids and names of the training set (for converted weights, "
                "`maskrcnn weights convert --categories` sets them)"
            )

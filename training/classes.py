"""Set a model's number of classes to the number of categories of a COCO data set."""

from .config import ConfigError, TrainConfig
from .data.coco.dataset import CocoDataset


def set_classes_from_dataset(dataset: CocoDataset, config: TrainConfig) -> TrainConfig:
    """Return a configuration with `model.num_classes` set to the data set's number of categories.

    Raises:
        ConfigError: The configuration explicitly sets `model.num_classes` to another number.
    """
    count, model = len(dataset.categories), config.model
    if "num_classes" in model.model_fields_set and model.num_classes != count:
        raise ConfigError(
            f"model.num_classes is {model.num_classes}, but {dataset.name} has {count} "
            f"categories; set model.num_classes={count}, or remove this key"
        )
    return config.model_copy(update={"model": model.model_copy(update={"num_classes": count})})

"""Configuration of an evaluation: the model is the checkpoint's, the rest is the user's."""

import logging
import shlex
from collections.abc import Sequence

from ..model.checkpoint import Checkpoint
from ..model.config_reference import text_from_value
from ..model.overrides import values_by_key
from .config import ConfigError, DataConfig, TrainConfig, validated_config

logger = logging.getLogger(__name__)

_INFERENCE = (
    "mask_paste",
    "rpn.pre_nms_top_n_test",
    "rpn.post_nms_top_n_test",
    "rpn.nms_iou",
    "rpn.min_side",
    "roi.min_side",
    "roi.score_threshold",
    "roi.nms_iou",
    "roi.nms_candidates",
    "roi.max_detections",
)
"""Keys of a model that change neither its parameters nor what they were trained to mean."""


def load_evaluation_config(
    source: str, overrides: Sequence[str], checkpoint: Checkpoint
) -> TrainConfig:
    """Configuration from a YAML file or a preset, with the model of a checkpoint.

    The section `model` of the source is not read, as the weights go with the checkpoint's own.
    Overrides may set those keys of it that are of inference alone.

    Raises:
        ConfigError: as `load_config`, and for an override that would make it another model.
    """
    own = checkpoint.model_config.model_dump(mode="json")
    config = validated_config(source, overrides, {"model": own})
    wanted = values_by_key(config.model.model_dump(mode="json"))
    for key, value in values_by_key(own).items():
        if key not in _INFERENCE and wanted[key] != value:
            raise ConfigError(
                f"model.{key}={text_from_value(wanted[key])} is another model than the "
                f"checkpoint's, which has {text_from_value(value)}; an evaluation may set "
                f"{', '.join(f'model.{name}' for name in _INFERENCE)}"
            )
    return config


def warn_of_other_sizes(data: DataConfig, checkpoint: Checkpoint) -> None:
    """Say in the log where images are not resized as the checkpoint has it, and export will."""
    usual = checkpoint.preprocessing
    own = {"min_size": usual.min_size, "max_size": usual.max_size, "buckets": checkpoint.buckets}
    others = {key: value for key, value in own.items() if getattr(data, key) != value}
    if others:
        logger.warning(
            "input sizes are not the checkpoint's, which an exported model keeps; for these give "
            "%s",
            shlex.join(f"data.{key}={text_from_value(value)}" for key, value in others.items()),
        )

"""Load an evaluation's configuration: `model` from the checkpoint, other sections from the user."""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from ...model.checkpoint import Checkpoint
from ...model.config.overrides import values_by_key
from ...model.config.reference import text_from_value
from ..config import ConfigError, DataConfig, TrainConfig, validated_config

logger = logging.getLogger(__name__)

# Keys of `model` that an evaluation may override, because they affect only inference.
_INFERENCE_KEYS = (
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


def load_evaluation_config(
    source: str | Path, overrides: Sequence[str], checkpoint: Checkpoint
) -> TrainConfig:
    """Load a configuration, with its section `model` replaced by that of a checkpoint.

    `source` is a YAML file or a preset. If neither `source` nor `overrides` sets `data.resize`, it
    is taken from the checkpoint. In section `model`, overrides may change only keys that do not
    affect training, such as `roi.nms_iou`.

    Raises:
        ConfigError: The configuration is invalid (see `validated_config`), or an override changes a
            key of `model` that affects training.
    """
    trained = checkpoint.model_config.model_dump(mode="json")
    config = validated_config(source, overrides, {"model": trained})
    requested = values_by_key(config.model.model_dump(mode="json"))
    for key, value in values_by_key(trained).items():
        if key not in _INFERENCE_KEYS and requested[key] != value:
            raise ConfigError(
                f"model.{key}={text_from_value(requested[key])} differs from the checkpoint's "
                f"{text_from_value(value)}; in section model, an evaluation may only override "
                f"{', '.join(f'model.{name}' for name in _INFERENCE_KEYS)}"
            )
    if "resize" in config.data.model_fields_set:
        return config
    data = config.data.model_copy(update={"resize": checkpoint.preprocessing.resize})
    return config.model_copy(update={"data": data})


def warn_of_other_sizes(data: DataConfig, checkpoint: Checkpoint) -> None:
    """Log a warning if input sizes or resize rule in `data` differ from those in the checkpoint."""
    preprocessing = checkpoint.preprocessing
    expected = {
        "min_size": preprocessing.min_size,
        "max_size": preprocessing.max_size,
        "resize": preprocessing.resize,
        "buckets": checkpoint.buckets,
    }
    others = {key: value for key, value in expected.items() if getattr(data, key) != value}
    if others:
        logger.warning(
            "the input sizes or the resize rule of this evaluation differ from the checkpoint's, "
            "which an export would use; to evaluate with the checkpoint's values, pass %s",
            shlex.join(f"data.{key}={text_from_value(value)}" for key, value in others.items()),
        )

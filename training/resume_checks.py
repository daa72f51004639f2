"""Check that a run can be resumed with a changed configuration."""

import hashlib
import logging
from typing import Any

from pydantic import ValidationError

from ..model.bundle.manifest import sha256_of
from ..model.checkpoint import Checkpoint
from ..model.config.error_messages import validation_message
from ..model.config.overrides import values_by_key
from ..model.config.reference import text_from_value
from .config import ConfigError, TrainConfig
from .data.coco.dataset import CocoDataset

logger = logging.getLogger(__name__)

# Configuration keys and sections that a resumed run must not change: they determine the model, the
# images of each step and their sizes.
_FIXED = ("model", "seed", "data", "solver.optimizer", "solver.images_per_batch")
# Keys within `_FIXED` that may change. The paths in `data.train` may change, because the ids of the
# images and the hash of the annotation file are compared instead. The hash also fixes
# `model.num_classes`, because training sets this key to the number of categories in the file.
_FREE = (
    "model.num_classes",
    "data.train",
    "data.val",
    "data.workers",
    "data.on_broken",
    "data.flip_probability",
    "data.transforms",
)
# Keys that are neither stored in checkpoints nor compared.
_IGNORED = {"output_dir"}


def run_identity(config: TrainConfig, dataset: CocoDataset) -> dict[str, Any]:
    """Return the run's configuration, and hashes of its training set, to store in checkpoints.

    When a run is resumed, `check_resumable` compares the stored values with the current ones.
    """
    ids = ",".join(str(record.id) for record in dataset.records)
    return {
        "config": config.model_dump(mode="json", exclude=_IGNORED),
        "data": {
            "number of images": len(dataset),
            "ids of the images": hashlib.sha256(ids.encode()).hexdigest(),
            "annotation file": ",".join(
                sha256_of(source.annotations)
                for source in (config.data.train, *config.data.extra_train)
            ),
        },
    }


def with_initial_weights(config: TrainConfig, checkpoint: Checkpoint) -> TrainConfig:
    """Return `config` with the key `weights` (initial weights) set to its value in `checkpoint`.

    A resumed run does not read its initial weights. If `config` has another value of this key, log
    that the value is ignored.

    Raises:
        ConfigError: The checkpoint has no training state.
    """
    weights = _identity_of(checkpoint)["config"].get("weights", config.weights)
    if config.weights != weights:
        logger.info(
            "weights=%s is ignored, because a resumed run continues from its last checkpoint; to "
            "start from these weights, choose another folder with output_dir=FOLDER",
            text_from_value(config.weights),
        )
    return config.model_copy(update={"weights": weights})


def check_resumable(checkpoint: Checkpoint, now: dict[str, Any], name: str) -> None:
    """Check that a run can be resumed from a checkpoint with the current configuration and data.

    The following must be the same as in the checkpoint:

    - the training images and annotations
    - the seed, the optimiser type and the batch size
    - the section `model`
    - the section `data`, except for `val`, `workers`, `on_broken`, `flip_probability`,
      `transforms`, and the paths in `train`

    All other keys may change. Changes are logged, except those of `output_dir`.

    Args:
        checkpoint: Checkpoint from which the run resumes.
        now: Result of `run_identity` for the current configuration and data.
        name: Path of the training annotations, for messages.

    Raises:
        ConfigError: The training data or a key that must not change has changed, the checkpoint has
            no training state, or its configuration is invalid in this version of the package.
    """
    before = _identity_of(checkpoint)
    old, new = _values_with_defaults(before["config"]), values_by_key(now["config"])
    for key in sorted(key for key in {*old, *new} if old.get(key) != new.get(key)):
        was, value = (text_from_value(values.get(key)) for values in (old, new))
        if _is_within(key, _FIXED) and not _is_within(key, _FREE):
            raise ConfigError(
                f"the run to resume has {key}={was}, but the configuration now has {key}={value}; "
                f"set {key}={was}, or start a new run with output_dir=FOLDER"
            )
        logger.info("resuming with %s=%s, previously %s", key, value, was)
    for subject, value in now["data"].items():
        if value != before["data"][subject]:
            raise ConfigError(
                f"the training data of {name} has changed since the run began (difference: "
                f"{subject}); restore the data, or start a new run from the checkpoint with "
                "weights=FILE output_dir=FOLDER"
            )


def _identity_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the configuration and training-set hashes (`run_identity`) that a checkpoint stores.

    Raises:
        ConfigError: The checkpoint has no training state.
    """
    if "identity" not in checkpoint.training_state:
        raise ConfigError(
            "the checkpoint to resume from has weights but no training state; start a new run from "
            "the weights with weights=FILE output_dir=FOLDER"
        )
    identity: dict[str, Any] = checkpoint.training_state["identity"]
    return identity


def _values_with_defaults(written: dict[str, Any]) -> dict[str, Any]:
    # Keys that did not exist yet when the run started get their defaults.
    try:
        config = TrainConfig.model_validate(written)
    except ValidationError as error:
        raise ConfigError(
            "the run to resume was created by another version of maskrcnn-trt: "
            f"{validation_message(error, TrainConfig)}; start a new run from its weights with "
            "weights=FILE output_dir=FOLDER"
        ) from None
    return values_by_key(config.model_dump(mode="json", exclude=_IGNORED))


def _is_within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)

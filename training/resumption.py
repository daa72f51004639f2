"""What a resumed run must share with the run it continues, and what may change."""

import hashlib
import logging
from typing import Any

from pydantic import ValidationError

from ..model.checkpoint import Checkpoint
from ..model.config_faults import sentence_from_fault
from ..model.manifest import sha256_of
from ..model.overrides import values_by_key
from .config import ConfigError, TrainConfig
from .data.coco import CocoDataset

logger = logging.getLogger(__name__)

_FIXED = ("model", "seed", "data", "solver.optimizer", "solver.images_per_batch")
"""Keys and sections that decide what the model is and which images a step sees."""
_FREE = ("data.train", "data.val", "data.workers", "data.on_broken")
"""Exceptions to these; the training images themselves are compared, wherever they lie."""
_IGNORED = {"output_dir", "weights"}


def run_identity(config: TrainConfig, dataset: CocoDataset) -> dict[str, Any]:
    """What a checkpoint keeps, and every rank compares: each host may have data of its own."""
    ids = ",".join(str(record.id) for record in dataset.records)
    return {
        "config": config.model_dump(mode="json", exclude=_IGNORED),
        "data": {
            "number of images": len(dataset),
            "ids of the images": hashlib.sha256(ids.encode()).hexdigest(),
            "annotation file": sha256_of(config.data.train.annotations),
        },
    }


def check_resumable(checkpoint: Checkpoint, now: dict[str, Any], name: str) -> None:
    """Hold a configuration and its data to those of the run to be resumed.

    The keys in `_FIXED` must be as they were and the training data the same. All other keys may
    change: they apply from the resumed iteration on, and the log names them.

    Args:
        checkpoint: of the run to be resumed.
        now: `run_identity` of the one that would resume it.
        name: of the training data, for messages.

    Raises:
        ConfigError: a key that must stay has changed, or the data has, or the checkpoint holds
            weights alone.
    """
    if "identity" not in checkpoint.training_state:
        raise ConfigError(
            "the checkpoint to resume has weights but no state of a run; start another from them "
            "with weights=FILE output_dir=FOLDER"
        )
    before = checkpoint.training_state["identity"]
    old, new = _values_with_defaults(before["config"]), values_by_key(now["config"])
    for key in sorted(key for key in {*old, *new} if old.get(key) != new.get(key)):
        if _is_within(key, _FIXED) and not _is_within(key, _FREE):
            raise ConfigError(
                f"the run to resume has {key}={old.get(key)}, not {new.get(key)}; give the same, "
                "or start another run with output_dir=FOLDER"
            )
        logger.info("resuming with %s=%s, which was %s", key, new.get(key), old.get(key))
    for subject, value in now["data"].items():
        if value != before["data"][subject]:
            raise ConfigError(
                f"the {subject} of {name} has changed since the run began; restore the data, or "
                "start another run from the checkpoint with weights=FILE output_dir=FOLDER"
            )


def _values_with_defaults(written: dict[str, Any]) -> dict[str, Any]:
    """Values by key of a run's configuration; of keys younger than the run, the defaults."""
    try:
        config = TrainConfig.model_validate(written)
    except ValidationError as error:
        raise ConfigError(
            "the run to resume is of another version of this program: "
            f"{sentence_from_fault(error, TrainConfig)}; start another from its weights with "
            "weights=FILE output_dir=FOLDER"
        ) from None
    return values_by_key(config.model_dump(mode="json", exclude=_IGNORED))


def _is_within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)

"""Best checkpoint of a run, and early stopping by target metrics or patience."""

import logging
from collections.abc import Mapping
from typing import Any

from ..model.bundle.manifest import sha256_of
from ..model.checkpoint import Checkpoint
from .config import EvaluationConfig, TrainConfig
from .evaluation.validation import reached_targets

logger = logging.getLogger(__name__)

# Metric that decides which checkpoint is the best.
BEST_BY = "segm/AP"


class EarlyStopping:
    """Early-stopping state: best mask AP of a run, and number of evaluations after the best one."""

    def __init__(
        self, settings: EvaluationConfig, state: Mapping[str, Any], validation_set: str | None
    ) -> None:
        """Create the early-stopping state of a new run, or restore that of a resumed run.

        Args:
            settings: Section `evaluation` of the configuration.
            state: `training_state` of the checkpoint to resume from; empty for a new run.
            validation_set: Hash of the validation set's annotation file. None: there is no
                validation set.
        """
        self._settings = settings
        self._validation_set = validation_set
        self._best_ap: float = state.get("best_ap", -1.0)
        # Checkpoints of earlier versions lack this number: count from 0.
        self._since_best: int = state.get("evaluations_since_best", 0)

    def state(self) -> dict[str, Any]:
        """Return the early-stopping state, as entries of a checkpoint's `training_state`."""
        return {
            "best_ap": self._best_ap,
            "evaluations_since_best": self._since_best,
            "validation_set": self._validation_set,
        }

    def record(self, metrics: Mapping[str, float]) -> bool:
        """Record the metrics of an evaluation. Return whether the mask AP is the best so far.

        If the mask AP is missing, or is -1 (no ground truth), the evaluation is ignored.
        """
        ap = metrics.get(BEST_BY, -1.0)
        if ap < 0:  # COCO's value for an AP that cannot be measured
            return False
        is_best = ap > self._best_ap
        if is_best:
            self._best_ap = ap
        self._since_best = 0 if is_best else self._since_best + 1
        return is_best

    def reason(self, metrics: dict[str, float]) -> str | None:
        """Return the reason to end the run after an evaluation with `metrics`. None: continue."""
        patience = self._settings.patience
        if patience is not None and self._since_best >= patience:
            return f"{BEST_BY} did not exceed {self._best_ap:.4f} in {self._since_best} evaluations"
        return reached_targets(self._settings, metrics)


def restored_evaluation(
    config: TrainConfig, last: Checkpoint | None
) -> tuple[EarlyStopping, dict[str, float]]:
    """Return the early-stopping state and the metrics with which a run starts or resumes.

    For a new run, the state is new and the metrics are empty. The same holds if the checkpoint was
    evaluated on another validation set than `config.data.val`.

    Args:
        config: Configuration of the run.
        last: Checkpoint from which the run resumes. None: the run is new.
    """
    state: Mapping[str, Any] = last.training_state if last else {}
    metrics = last.metrics if last else {}
    earlier = state.get("validation_set")  # checkpoints of earlier versions lack it
    current = earlier
    val = config.data.val
    # `Validation` reports a missing file.
    if val is not None and not config.evaluation.skip_test and val.annotations.is_file():
        current = sha256_of(val.annotations)
    if earlier is not None and current != earlier:
        logger.info(
            "the validation set has changed, so the best %s and the count of evaluations for "
            "evaluation.patience start anew",
            BEST_BY,
        )
        state, metrics = {}, {}
    return EarlyStopping(config.evaluation, state, current), metrics

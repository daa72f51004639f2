"""Best checkpoint of a run, and early stopping by target metrics or patience."""

from collections.abc import Mapping
from typing import Any

from .config import EvaluationConfig
from .evaluation.validation import reached_targets

# Metric that decides which checkpoint is the best.
BEST_BY = "segm/AP"


class EarlyStopping:
    """Early-stopping state: best mask AP of a run, and number of evaluations after the best one."""

    def __init__(self, settings: EvaluationConfig, state: Mapping[str, Any]) -> None:
        """Create the early-stopping state of a new run, or restore that of a resumed run.

        Args:
            settings: Section `evaluation` of the configuration.
            state: `training_state` of the checkpoint to resume from; empty for a new run.
        """
        self._settings = settings
        self._best_ap: float = state.get("best_ap", -1.0)
        # Checkpoints of earlier versions lack this number: count from 0.
        self._since_best: int = state.get("evaluations_since_best", 0)

    def state(self) -> dict[str, Any]:
        """Return the early-stopping state, as entries of a checkpoint's `training_state`."""
        return {"best_ap": self._best_ap, "evaluations_since_best": self._since_best}

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

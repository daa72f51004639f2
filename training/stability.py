"""The same training from several seeds: how much of a metric is chance."""

import json
import statistics
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from .config import ConfigError, TrainConfig
from .distributed import worker
from .run import train
from .validation import check_expected

STABILITY_FILE = "stability.json"


class Stability(NamedTuple):
    """Final metrics by seed."""

    metrics: dict[int, dict[str, float]]

    @property
    def mean(self) -> dict[str, float]:
        """Mean of every metric over the seeds."""
        return {name: statistics.fmean(values) for name, values in self._values().items()}

    @property
    def deviation(self) -> dict[str, float]:
        """Standard deviation of every metric, estimated from the seeds as a sample."""
        return {name: statistics.stdev(values) for name, values in self._values().items()}

    def _values(self) -> dict[str, list[float]]:
        runs = list(self.metrics.values())
        return {name: [run[name] for run in runs] for name in runs[0]}

    def write(self, path: Path) -> None:
        """Write all metrics as JSON, by seed and over the seeds."""
        content = {"seeds": self.metrics, "mean": self.mean, "deviation": self.deviation}
        path.write_text(json.dumps(content, indent=2) + "\n")

    def table(self) -> Table:
        """AP of boxes and masks."""
        table = Table("seed", "box AP", "mask AP")
        rows = {str(seed): metrics for seed, metrics in self.metrics.items()}
        for name, metrics in (rows | {"mean": self.mean, "deviation": self.deviation}).items():
            table.add_row(name, f"{metrics['bbox/AP']:.4f}", f"{metrics['segm/AP']:.4f}")
        return table


def train_seeds(config: TrainConfig, count: int, *, resume: bool = False) -> Stability:
    """Train with the seeds `seed`, `seed + 1`, ... into folders `seed-N` of `output_dir`.

    Metrics by seed, their means and deviations are written into `stability.json` beside them. Runs
    that are finished are not repeated when resumed.

    Args:
        config: of every run but for the seed.
        count: number of seeds, 2 at least.
        resume: continue what is there.

    Raises:
        ConfigError: the runs would not be measured, or as for `run_training`.
        DataError: the data cannot be used.
        DivergenceError: a loss or a weight is no longer finite.
        ExpectationError: the means fall short of `evaluation.expected`.
    """
    if config.data.val is None or config.evaluation.skip_test or config.evaluation.skip_eval:
        raise ConfigError(
            "seeds are compared by their AP; give data.val, and leave out evaluation.skip_test and "
            "evaluation.skip_eval"
        )
    metrics = {}
    with worker(config.device) as own:
        for seed in range(config.seed, config.seed + count):
            folder = config.output_dir / f"seed-{seed}"
            run = config.model_copy(update={"seed": seed, "output_dir": folder})
            _, metrics[seed] = train(run, own, resume=resume)
        stability = Stability(metrics)
        if own.is_main:
            stability.write(config.output_dir / STABILITY_FILE)
    check_expected(config.evaluation, stability.mean)
    return stability

"""Train with several seeds, and report mean and standard deviation of the metrics."""

import json
import statistics
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from .config import ConfigError, TrainConfig
from .distributed import worker
from .evaluation.validation import check_expected
from .run import train
from .run_folder import RunFolder

STABILITY_FILE = "stability.json"


class Stability(NamedTuple):
    """Final metrics of training runs that differ only in the seed."""

    # Value by seed, then by metric name such as `bbox/AP`.
    metrics: dict[int, dict[str, float]]

    @property
    def mean(self) -> dict[str, float]:
        """Mean of each metric over all runs. Metrics that any run lacks are left out."""
        return {name: statistics.fmean(values) for name, values in self._values().items()}

    @property
    def deviation(self) -> dict[str, float]:
        """Sample standard deviation of each metric. Metrics that any run lacks are left out."""
        return {name: statistics.stdev(values) for name, values in self._values().items()}

    def _values(self) -> dict[str, list[float]]:
        # With `resume`, some runs may have finished earlier with other settings, such as
        # `evaluation.losses`, and have other metrics.
        runs = list(self.metrics.values())
        common = [name for name in runs[0] if all(name in run for run in runs)]
        return {name: [run[name] for run in runs] for name in common}

    def write(self, path: Path) -> None:
        """Write the metrics of each seed, their means and standard deviations as JSON."""
        content = {"seeds": self.metrics, "mean": self.mean, "deviation": self.deviation}
        path.write_text(json.dumps(content, indent=2) + "\n")

    def table(self) -> Table:
        """Return a table of box AP and mask AP: a row per seed, and rows of mean and deviation."""
        table = Table("seed", "box AP", "mask AP")
        rows = {str(seed): metrics for seed, metrics in self.metrics.items()}
        for name, metrics in (rows | {"mean": self.mean, "deviation": self.deviation}).items():
            table.add_row(name, f"{metrics['bbox/AP']:.4f}", f"{metrics['segm/AP']:.4f}")
        return table


def train_seeds(config: TrainConfig, count: int, *, resume: bool = False) -> Stability:
    """Train one model per seed: `config.seed`, `config.seed + 1`, ...

    The folder of the run with seed N is `output_dir/seed-N`. The metrics of all runs are written to
    `output_dir/stability.json`. `evaluation.expected` is checked only against the mean metrics.

    Raises the errors of `run_training`, and the errors below.

    Args:
        config: Configuration of all runs.
        count: Number of seeds, at least 2.
        resume: Resume interrupted runs, and skip finished runs.

    Returns:
        Final metrics by seed.

    Raises:
        ConfigError: The configuration has no evaluation.
        ExpectationError: The mean of a metric over the seeds is below its value in
            `evaluation.expected` by more than `evaluation.tolerance`, or the metric is missing.
    """
    if config.data.val is None or config.evaluation.skip_test or config.evaluation.skip_eval:
        raise ConfigError(
            "--seeds needs evaluations; set data.val, and remove evaluation.skip_test and "
            "evaluation.skip_eval"
        )
    folders = {
        seed: config.output_dir / f"seed-{seed}" for seed in range(config.seed, config.seed + count)
    }
    if not resume:
        for folder in folders.values():  # before the first model is trained
            RunFolder(folder).open(resume=False)
    metrics = {}
    with worker(config.device) as rank:
        for seed, folder in folders.items():
            run = config.model_copy(update={"seed": seed, "output_dir": folder})
            _, metrics[seed] = train(run, rank, resume=resume)
        stability = Stability(metrics)
        if rank.is_main:
            stability.write(config.output_dir / STABILITY_FILE)
    check_expected(config.evaluation, stability.mean)
    return stability

"""What a training run says of itself: log lines, JSON lines, TensorBoard and a progress bar."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from ..model.checkpoint import whole_file
from ..model.losses import LOSS_NAMES
from .distributed import Worker

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"


class DivergenceError(Exception):
    """Training has left the finite numbers."""

    def __init__(self, symptom: str) -> None:
        super().__init__(
            f"{symptom}; lower solver.base_lr, lengthen solver.warmup_iterations, or set "
            "solver.clip_gradient_norm"
        )


class TrainingReport:
    """Collects the losses of every iteration and reports them once a period.

    Only the first rank writes. Losses stay on the device until they are reported, so that training
    does not wait for them.
    """

    def __init__(
        self, folder: Path, period: int, iterations: range, worker: Worker, progress: Progress
    ) -> None:
        """Open the files.

        Args:
            folder: of the run.
            period: iterations between reports.
            iterations: those that are to come.
            worker: this process.
            progress: where a bar is shown; its tasks have a field `note`.
        """
        self._period = period
        self._iterations = iterations
        self._is_main = worker.is_main
        if worker.is_main:
            # A killed run may have reported more than its last checkpoint knows.
            _cut_lines_after(iterations.start, folder / METRICS_FILE)
            self._jsonl = (folder / METRICS_FILE).open("a", buffering=1)
            self._tensorboard = SummaryWriter(
                str(folder / "tensorboard"), purge_step=iterations.start + 1
            )
        self._progress = progress
        self._task = progress.add_task(
            "training", total=iterations.stop, completed=iterations.start, note=""
        )
        self._done, self._rate = iterations.start, 0.0
        self._losses: list[Tensor] = []
        self._data_seconds = 0.0
        self._period_start = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._is_main:
            self._tensorboard.close()
            self._jsonl.close()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time spent inside as waiting for data."""
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    def record(self, iteration: int, losses: Tensor, rate: float) -> None:
        """Take note of an iteration, counted from 0, that is done.

        Args:
            iteration: which one.
            losses: [5] means, in the order of `LOSS_NAMES`.
            rate: its learning rate.

        Raises:
            DivergenceError: a loss reported now is not finite.
        """
        self._losses.append(losses)
        self._done, self._rate = iteration + 1, rate
        self._progress.update(self._task, completed=self._done)
        if self._done % self._period == 0 or self._done == self._iterations.stop:
            self._report()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Report what is not yet; the time spent inside is not counted as training.

        Raises:
            DivergenceError: a loss reported now is not finite.
        """
        if self._losses:  # an evaluation may end the run
            self._report()
        yield
        self._period_start = time.perf_counter()

    def record_metrics(self, iteration: int, metrics: dict[str, float]) -> None:
        """Write the metrics of an evaluation after so many iterations."""
        self._write(iteration, metrics)

    def _report(self) -> None:
        done, rate = self._done, self._rate
        losses = torch.stack(self._losses).double().cpu()
        losses = torch.cat([losses.sum(dim=1, keepdim=True), losses], dim=1)
        now = time.perf_counter()
        seconds = (now - self._period_start) / len(losses)
        data_seconds = self._data_seconds / len(losses)
        self._losses, self._data_seconds, self._period_start = [], 0.0, now
        medians = losses.quantile(0.5, dim=0).tolist()
        means = losses.mean(dim=0).tolist()
        names = ("loss", *LOSS_NAMES)
        eta = timedelta(seconds=int(seconds * (self._iterations.stop - done)))
        memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
        losses_text = "  ".join(
            f"{name}: {median:.4f} ({mean:.4f})"
            for name, median, mean in zip(names, medians, means, strict=True)
        )
        logger.info(
            f"eta: {eta}  iter: {done}  {losses_text}  time: {seconds:.4f}  "
            f"data: {data_seconds:.4f}  lr: {rate:.6f}  max mem: {memory:.0f} MiB"
        )
        self._progress.update(self._task, note=f"loss {medians[0]:.3f}")
        values = dict(zip(names, means, strict=True))
        values |= {f"{n}/median": m for n, m in zip(names, medians, strict=True)}
        values |= {"time": seconds, "data_time": data_seconds, "lr": rate, "max_memory_mib": memory}
        self._write(done, values)
        if not losses.isfinite().all():
            raise DivergenceError(
                f"a loss was not finite within the {len(losses)} iterations before {done}"
            )

    def _write(self, iteration: int, values: dict[str, float]) -> None:
        if not self._is_main:
            return
        self._jsonl.write(json.dumps({"iteration": iteration, **values}) + "\n")
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, iteration)


def _cut_lines_after(iteration: int, path: Path) -> None:
    """Remove from a file of JSON lines those of later iterations, and one that is half-written."""
    if not path.is_file():
        return
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    kept = [line for line in whole if json.loads(line)["iteration"] <= iteration]
    if len(kept) < len(lines):
        with whole_file(path) as file:
            file.write("".join(kept).encode())

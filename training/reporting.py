"""Report losses and metrics of a training run: log, `metrics.jsonl`, trackers, progress bars."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Self, TypeVar

import torch
from rich.progress import Progress
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..model.atomic_files import atomic_write
from ..model.losses import LOSS_NAMES
from .distributed import Worker
from .tracking import Tracker

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"
# Minimum loss scale of an fp16 run. The scale starts at 65536, and 33 skipped steps in a row make
# it smaller than this.
_LEAST_LOSS_SCALE = 2.0**-16

_ADVICE = (
    "lower solver.base_lr, lengthen solver.warmup_iterations, or set solver.clip_gradient_norm"
)

_Item = TypeVar("_Item")


class DivergenceError(Exception):
    """Training diverged: losses, weights or gradients are NaN or infinite."""

    def __init__(self, symptom: str, advice: str = _ADVICE) -> None:
        super().__init__(symptom, advice)

    def __str__(self) -> str:
        return "; ".join(self.args)


def check_loss_scale(scaler: GradScaler, iteration: int) -> None:
    """Check that the loss scale of fp16 training is at least 2 ** -16.

    Finite losses alone do not show that training works. The loss scaler skips each step in which a
    gradient is NaN or infinite, and halves the loss scale. While all steps are skipped, the weights
    do not change, so the losses stay finite.

    Args:
        scaler: Loss scaler of the run. If it is disabled, nothing is checked.
        iteration: Number of completed iterations, for the error message.

    Raises:
        DivergenceError: The loss scale is smaller than 2 ** -16.
    """
    if scaler.is_enabled() and scaler.get_scale() < _LEAST_LOSS_SCALE:
        raise DivergenceError(
            "in fp16, steps were skipped because gradients were NaN or infinite, and the loss "
            f"scale fell to {scaler.get_scale():.1g} by iteration {iteration}",
            "start a new run with precision=bf16; if this error comes back, lower solver.base_lr",
        )


class TrainingReport:
    """Report of losses and timings of a run every `period` iterations. Only rank 0 writes files."""

    def __init__(
        self,
        folder: Path,
        period: int,
        iterations: range,
        worker: Worker,
        progress: Progress,
        scaler: GradScaler,
        trackers: Sequence[Tracker] = (),
        *,
        is_evaluated: bool = True,
    ) -> None:
        """Open `metrics.jsonl`, and remove lines that a killed run wrote after its last checkpoint.

        Args:
            folder: Folder of the run.
            period: Iterations between reports.
            iterations: Iterations to train, counted from 0.
            worker: Rank of this process.
            progress: Progress bars from `terminal_progress`.
            scaler: Loss scaler of the run, enabled in fp16.
            trackers: Result of `open_trackers`. They are closed with the report.
            is_evaluated: False: the checkpoint to resume from lacks the metrics of a due
                evaluation. The evaluation will be repeated, so the lines with its metrics are
                removed.
        """
        self._period = period
        self._iterations = iterations
        self._is_main = worker.is_main
        self._scaler = scaler
        self._path = folder / METRICS_FILE
        if worker.is_main:
            _remove_lines_after(iterations.start, self._path, is_evaluated=is_evaluated)
            self._jsonl = self._path.open("a", buffering=1)
        self._trackers = trackers
        self._progress = progress
        self._task = progress.add_task(
            "training", total=iterations.stop, completed=iterations.start, note=""
        )
        self._done, self._rate = iterations.start, 0.0
        # Losses stay on the device until reported, so that training does not wait for copies.
        self._losses: list[Tensor] = []
        self._data_seconds = 0.0
        self._period_start = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._is_main:
            with suppress(OSError):
                self._jsonl.close()
        for tracker in self._trackers:
            tracker.close(failed=error is not None)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Add the duration of the `with` block to the reported data-loading time."""
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    def record(self, iteration: int, losses: Tensor, rate: float) -> None:
        """Record a completed iteration. At the end of a period or of the run, report the losses.

        Args:
            iteration: Iteration, counted from 0.
            losses: [5] losses in the order of `LOSS_NAMES`, averaged over the global batch.
            rate: Learning rate of the iteration.

        Raises:
            DivergenceError: A loss of an iteration in the reported period is not finite, or the
                loss scale is too small (`check_loss_scale`).
        """
        self._losses.append(losses)
        self._done, self._rate = iteration + 1, rate
        self._progress.update(self._task, completed=self._done)
        if self._done % self._period == 0 or self._done == self._iterations.stop:
            self._report()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Exclude the duration of the `with` block from the reported time per iteration.

        Before the block, report the losses of all iterations since the last report.

        Raises:
            DivergenceError: A reported loss is not finite, or the loss scale is too small
                (`check_loss_scale`).
        """
        # Losses are reported first, because the run may end with this evaluation.
        if self._losses:
            self._report()
        yield
        self._period_start = time.perf_counter()

    def record_metrics(self, iteration: int, metrics: dict[str, float]) -> None:
        """On rank 0, write metrics to `metrics.jsonl` and trackers.

        `iteration` is the number of completed iterations. If the file cannot be written, log a
        warning and close the file.
        """
        if not self._is_main:
            return
        if not self._jsonl.closed:
            self._write_line({"iteration": iteration, **metrics})
        for tracker in self._trackers:
            tracker.log(metrics, iteration)

    def record_drawing(self, iteration: int, path: Path) -> None:
        """Send the PNG file `path`, which shows detections, to the trackers if the file exists.

        `iteration` is the number of iterations that were completed when the file was written.
        """
        if path.is_file():
            for tracker in self._trackers:
                tracker.log_drawing(path, iteration)

    def _write_line(self, values: dict[str, float]) -> None:
        try:
            self._jsonl.write(json.dumps(values) + "\n")
        except OSError as error:  # a full disk need not end the run before the next checkpoint
            warn_of_unwritten(self._path, error)
            with suppress(OSError):
                self._jsonl.close()

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
        if self._scaler.is_enabled():
            values["loss_scale"] = self._scaler.get_scale()
        values |= {"time": seconds, "data_time": data_seconds, "lr": rate, "max_memory_mib": memory}
        self.record_metrics(done, values)
        if not losses.isfinite().all():
            raise DivergenceError(
                f"a loss was NaN or infinite in at least one of the last {len(losses)} iterations, "
                f"up to iteration {done}"
            )
        check_loss_scale(self._scaler, done)


def with_progress(
    items: Iterable[_Item], total: int, progress: Progress, description: str
) -> Iterator[_Item]:
    """Yield items, and show the number of processed items on a progress bar.

    Args:
        items: Items to yield.
        total: Number of items.
        progress: Progress bars from `terminal_progress`.
        description: Label of the bar.
    """
    task = progress.add_task(description, total=total, note="")
    for item in items:
        yield item
        progress.advance(task)
    progress.remove_task(task)


def _remove_lines_after(iteration: int, path: Path, *, is_evaluated: bool) -> None:
    """Remove damaged lines, and lines of iterations after `iteration`, from a metrics file.

    If `is_evaluated` is False, the evaluation at `iteration` will be repeated. Then also remove the
    lines of `iteration` that have no loss: they have the metrics of an evaluation.
    """
    if not path.is_file():
        return
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if line.endswith("\n")
        and (values := metrics_from_line(line))
        and int(values["iteration"]) <= iteration
        and (is_evaluated or int(values["iteration"]) < iteration or "loss" in values)
    ]
    if len(kept) < len(lines):
        with atomic_write(path) as file:
            file.write("".join(kept).encode())


def warn_of_unwritten(path: Path, error: OSError) -> None:
    """Log a warning that a file cannot be written, and that training continues without it."""
    logger.warning(
        "cannot write %s: %s; the run continues without it", path, error.strerror or error
    )


def metrics_from_line(line: str) -> dict[str, float] | None:
    """Return the iteration and metrics of a line of `metrics.jsonl`. None: the line is damaged."""
    try:
        values: dict[str, float] = json.loads(line)
        int(values["iteration"])
    except (ValueError, TypeError, KeyError):
        return None
    return values

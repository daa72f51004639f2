"""Trackers of training runs: TensorBoard, MLflow and Weights & Biases through their libraries."""

import importlib
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ..model.atomic_files import atomic_write
from .config import ConfigError, TrainConfig

logger = logging.getLogger(__name__)

_MODULES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
# File with the ids that MLflow and Weights & Biases have assigned to the run. With these ids, a
# resumed run adds to its earlier records.
_IDS_FILE = "trackers.json"


class Tracker(Protocol):
    """Interface of all trackers. They record the metrics of a run, and images with detections."""

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Record values such as losses and metrics, given by name.

        `iteration` is the number of completed iterations.
        """

    def log_drawing(self, path: Path, iteration: int) -> None:
        """Record a PNG file that shows detections on validation images.

        `iteration` is the number of iterations that were completed when the file was written.
        """

    def close(self, *, failed: bool) -> None:
        """Send pending values and close the tracker. `failed`: training ended with an error."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that the libraries of the trackers are installed.

    Raises:
        ConfigError: A library is missing.
    """
    for name in names:
        try:
            importlib.import_module(_MODULES[name])
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"trackers contains {name}, but {error.name} is not installed; install it with "
                f"pip install {name}, or remove {name} from trackers"
            ) from None


def open_trackers(config: TrainConfig, first_iteration: int) -> list[Tracker]:
    """Open the trackers that the configuration names. A resumed run adds to its earlier records.

    Args:
        config: Configuration of the run.
        first_iteration: Number of iterations that the run has completed; 0 for a new run.

    Raises:
        ConfigError: A tracker cannot start, for example because it needs a login.
    """
    folder = config.output_dir
    path = folder / _IDS_FILE
    ids: dict[str, str] = {}
    if first_iteration and path.is_file():
        ids = json.loads(path.read_text())
    trackers: list[Tracker] = []
    for name in config.trackers:
        if name == "tensorboard":
            trackers.append(_Tolerant(_TensorBoard(folder, first_iteration), name))
            continue
        try:
            remote = (_MLflow if name == "mlflow" else _WandB)(config, ids.get(name))
        except Exception as error:  # the libraries have no common base class of errors
            for started in trackers:
                started.close(failed=True)
            raise ConfigError(
                f"the tracker {name} cannot start: {error}; set it up by its environment "
                f"variables, or remove {name} from trackers"
            ) from error
        ids[name] = remote.id
        trackers.append(_Tolerant(remote, name))
    if ids:
        with atomic_write(path) as file:
            file.write(json.dumps(ids).encode())
    return trackers


class _TensorBoard:
    def __init__(self, folder: Path, first_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # `purge_step` hides the values that a killed run wrote after its last checkpoint.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_iteration + 1)
        # The writer's thread prints a traceback if it cannot write, for example because the disk is
        # full. Suppress it, because the next call of the writer raises the same exception.
        self._print_traceback = threading.excepthook
        threading.excepthook = self._print_traceback_of_others

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)

    def log_drawing(self, path: Path, iteration: int) -> None:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(path.parent.name, pixels, iteration, dataformats="HWC")

    def close(self, *, failed: bool) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._print_traceback

    def _print_traceback_of_others(self, args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__module__.startswith("tensorboard."):
            threading.excepthook = self._print_traceback
        else:
            self._print_traceback(args)


class _MLflow:
    def __init__(self, config: TrainConfig, run_id: str | None) -> None:
        self._mlflow = importlib.import_module("mlflow")
        name = None if run_id else config.output_dir.name
        self.id: str = self._mlflow.start_run(run_id=run_id, run_name=name).info.run_id
        self._mlflow.log_dict(config.model_dump(mode="json"), "config.json")

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        # Replace characters that MLflow rejects in metric names, because class names may contain
        # them.
        named = {re.sub(r"[^\w./ -]", "_", name): value for name, value in values.items()}
        self._mlflow.log_metrics(named, step=iteration, run_id=self.id)

    def log_drawing(self, path: Path, iteration: int) -> None:
        self._mlflow.log_artifact(str(path), path.parent.name, run_id=self.id)

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class _WandB:
    def __init__(self, config: TrainConfig, run_id: str | None) -> None:
        self._run: Any = importlib.import_module("wandb").init(
            dir=str(config.output_dir),
            name=config.output_dir.name,
            id=run_id,
            resume="allow" if run_id else None,
            config=config.model_dump(mode="json"),
        )
        self.id: str = self._run.id
        # A resumed run may repeat iterations, but W&B's own steps can only increase. Therefore plot
        # all metrics over the logged value `iteration`.
        self._run.define_metric("*", step_metric="iteration")

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self._run.log({"iteration": iteration, **values})

    def log_drawing(self, path: Path, iteration: int) -> None:
        image = importlib.import_module("wandb").Image(str(path))
        self._run.log({"iteration": iteration, path.parent.name: image})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Tolerant:
    """Wrapper of a tracker. If the tracker fails, log a warning, and continue without it."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker: Tracker | None = tracker
        self._name = name

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self._try(lambda tracker: tracker.log(values, iteration))

    def log_drawing(self, path: Path, iteration: int) -> None:
        self._try(lambda tracker: tracker.log_drawing(path, iteration))

    def _try(self, send: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            send(self._tracker)
        except Exception as error:
            logger.warning(
                "the tracker %s failed, so the run continues without it: %s", self._name, error
            )
            failed, self._tracker = self._tracker, None
            with suppress(Exception):
                failed.close(failed=True)

    def close(self, *, failed: bool) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker.close(failed=failed)
        except Exception as error:
            logger.warning("the tracker %s cannot be closed: %s", self._name, error)

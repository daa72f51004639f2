"""A training run: data, model, steps, checkpoints and evaluation, in one folder."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.logging import RichHandler

from ..model.checkpoint import load_checkpoint
from .config import ConfigError, TrainConfig
from .data.coco import CocoDataset
from .distributed import Worker, worker
from .loop import TrainingLoop
from .reporting import LOG_FILE
from .resumption import check_resumable
from .run_folder import RunFolder
from .trainer import Trainer
from .validation import Validation, check_expected

logger = logging.getLogger(__name__)


def run_training(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train from a configuration; under `torchrun`, as one of its processes.

    Returns:
        The final checkpoint.

    Raises:
        ConfigError: the configuration does not fit the data, the machine or the run to resume.
        DataError: the data cannot be used.
        DivergenceError: a loss or a weight is no longer finite.
        ExpectationError: the final metrics fall short of `evaluation.expected`.
    """
    with worker(config.device) as own:
        checkpoint, metrics = train(config, own, resume=resume)
    check_expected(config.evaluation, metrics)
    return checkpoint


def run_evaluation(checkpoint_path: Path, config: TrainConfig) -> dict[str, float]:
    """Metrics of a checkpoint on the validation set of a configuration.

    The files of the evaluation are written into the folder `inference` of `output_dir`.

    Raises:
        ConfigError: no validation set, or one of other classes than the checkpoint's.
        CheckpointError: the checkpoint cannot be read.
    """
    checkpoint = load_checkpoint(checkpoint_path)
    with worker(config.device) as own:
        _set_arithmetic(config)
        validation = Validation(config, checkpoint.model_config.num_classes, own)
        return validation.measure(checkpoint.build_model().to(own.device))


def train(config: TrainConfig, own: Worker, *, resume: bool) -> tuple[Path, dict[str, float]]:
    """Train as one of the processes that have joined; the final checkpoint and its metrics."""
    _set_arithmetic(config)
    folder = RunFolder(config.output_dir)
    last = folder.open(resume=resume)
    if own.is_main:
        folder.remove_partial_files()
    with _logging_to(config.output_dir / LOG_FILE, own):
        dataset = CocoDataset(config.data.train, config.data.on_broken)
        config = _with_classes_of(dataset, config)
        if last is not None:
            check_resumable(last, config, dataset)
            # The checkpoint has the weights; the file that training began with may be gone.
            config = config.model_copy(update={"weights": None})
        trainer = Trainer(config, own)
        loop = TrainingLoop(trainer, dataset, folder, last)
        if last is not None:
            trainer.load_state(last)
            logger.info("resuming at iteration %d", trainer.iteration)
        metrics = loop.run()
        own.wait_for_ranks()  # for the first, which writes the checkpoint
        return folder.last(), metrics


def _set_arithmetic(config: TrainConfig) -> None:
    """Allow or forbid TF32 in the matrix products and convolutions of float32 tensors."""
    allowed = config.precision == "tf32"
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def _with_classes_of(dataset: CocoDataset, config: TrainConfig) -> TrainConfig:
    """The configuration with the number of classes of the data.

    Raises:
        ConfigError: the configuration names another number.
    """
    count, model = len(dataset.categories), config.model
    if "num_classes" in model.model_fields_set and model.num_classes != count:
        raise ConfigError(
            f"model.num_classes is {model.num_classes}, but {dataset.name} has {count} "
            f"categories; set model.num_classes={count}, or leave it out"
        )
    return config.model_copy(update={"model": model.model_copy(update={"num_classes": count})})


@contextmanager
def _logging_to(path: Path, own: Worker) -> Iterator[None]:
    """Log lines of the first rank to a file and the terminal; of the others, warnings only."""
    package = logging.getLogger(__package__)
    handlers: list[logging.Handler] = [RichHandler(console=Console(stderr=True), show_path=False)]
    if own.is_main:
        handlers.append(logging.FileHandler(path))
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package.setLevel(logging.INFO if own.is_main else logging.WARNING)
    for handler in handlers:
        package.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()

"""A training run: data, model, steps, checkpoints and evaluation, in one folder."""

import logging
from dataclasses import replace
from pathlib import Path

from ..model.checkpoint import Checkpoint
from ..model.config_reference import text_from_value
from .classes import with_classes_of
from .config import TrainConfig, yaml_from_config
from .data.coco import CocoDataset
from .distributed import Worker, worker
from .evaluation_config import warn_of_other_sizes
from .loop import TrainingLoop
from .reporting import LOG_FILE
from .resumption import check_resumable, run_identity
from .run_folder import RunFolder
from .terminal import shown_on_terminal
from .trainer import Trainer, set_arithmetic
from .validation import Validation, check_expected

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"


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


def evaluate_checkpoint(
    checkpoint: Checkpoint, config: TrainConfig, own: Worker
) -> dict[str, float]:
    """Metrics of a checkpoint, as one of the processes that have joined; on every one the same.

    The files of the evaluation are written into the folder `inference` of `output_dir`.

    Args:
        checkpoint: its weights and classes are measured.
        config: from `load_evaluation_config`.
        own: this process.

    Raises:
        ConfigError: no validation set, or one with categories that the checkpoint does not know.
        DataError: the data cannot be used.
    """
    set_arithmetic(config)
    with shown_on_terminal(own) as progress:
        if own.is_main:
            warn_of_other_sizes(config.data, checkpoint)
        validation = Validation(config, checkpoint.categories, own)
        model = replace(checkpoint, model_config=config.model).build_model()
        return validation.measure(model.to(own.device), progress)


def train(config: TrainConfig, own: Worker, *, resume: bool) -> tuple[Path, dict[str, float]]:
    """Train as one of the processes that have joined; the final checkpoint and its metrics."""
    set_arithmetic(config)
    folder = RunFolder(config.output_dir, config.keep_checkpoints)
    last = folder.open(resume=resume)
    if own.is_main:
        folder.remove_partial_files()
    with shown_on_terminal(own, config.output_dir / LOG_FILE) as progress:
        dataset = CocoDataset(config.data.train, config.data.on_broken)
        config = with_classes_of(dataset, config)
        identity = run_identity(config, dataset)
        if last is not None:
            check_resumable(last, identity, dataset.name)
        if own.is_main:
            _record(config)
        if last is not None:
            # The checkpoint has the weights; the file that training began with may be gone.
            config = config.model_copy(update={"weights": None})
        trainer = Trainer(config, own)
        if last is not None:
            trainer.load_state(last)
            logger.info("resuming at iteration %d", trainer.iteration)
        metrics = TrainingLoop(trainer, dataset, folder, identity, progress, last).run()
        own.wait_for_ranks()  # for the first, which writes the checkpoint
        return folder.last(), metrics


def _record(config: TrainConfig) -> None:
    """Keep what a run is made with: all of it in its folder, and the solver's part in its log."""
    (config.output_dir / CONFIG_FILE).write_text(yaml_from_config(config))
    solver = config.solver.model_dump()
    logger.info("solver: %s", " ".join(f"{k}={text_from_value(v)}" for k, v in solver.items()))

"""A training run: data, model, steps, checkpoints and evaluation, in one folder."""

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.logging import RichHandler

from ..model.checkpoint import Checkpoint, load_checkpoint
from ..model.manifest import Preprocessing
from ..model.mask_rcnn import MaskRCNN
from .config import ConfigError, TrainConfig
from .data.coco import CocoDataset
from .data.loader import eval_loader, train_loader
from .distributed import Worker, worker
from .evaluation import evaluate_model
from .reporting import LOG_FILE, DivergenceError, TrainingReport
from .run_folder import RunFolder
from .schedule import learning_rate
from .trainer import AUTOCAST_DTYPES, Trainer

logger = logging.getLogger(__name__)


def run_training(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train from a configuration; under `torchrun`, as one of its processes.

    Returns:
        The final checkpoint.

    Raises:
        ConfigError: the configuration does not fit the data, the machine or the run to resume.
        DataError: the data cannot be used.
        DivergenceError: a loss or a weight is no longer finite.
    """
    with worker(config.device) as own:
        _set_arithmetic(config)
        folder = RunFolder(config.output_dir)
        last = folder.open(resume=resume)
        with _logging_to(config.output_dir / LOG_FILE, own):
            dataset = CocoDataset(config.data.train, config.data.on_broken)
            config = _with_classes_of(dataset, config)
            trainer = Trainer(config, own)
            if last is not None:
                trainer.load_state(last)
                logger.info("resuming at iteration %d", trainer.iteration)
            _train(trainer, dataset, folder)
            own.wait_for_ranks()  # for the first, which writes the checkpoint
            return folder.last()


def run_evaluation(checkpoint_path: Path, config: TrainConfig) -> dict[str, float]:
    """Metrics of a checkpoint on the validation set of a configuration.

    Raises:
        ConfigError: no validation set, or one of other classes than the checkpoint's.
        CheckpointError: the checkpoint cannot be read.
    """
    checkpoint = load_checkpoint(checkpoint_path)
    with worker(config.device) as own:
        _set_arithmetic(config)
        return evaluate(checkpoint.build_model().to(own.device), config, own, config.output_dir)


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


def evaluate(
    model: MaskRCNN, config: TrainConfig, own: Worker, folder: Path | None
) -> dict[str, float]:
    """COCO metrics of a model on the validation set; every rank gets them.

    Raises:
        ConfigError: the configuration has no validation set, or one of other classes.
    """
    if config.data.val is None:
        raise ConfigError(
            "there is no validation set; set data.val.images and data.val.annotations"
        )
    dataset = CocoDataset(config.data.val, config.data.on_broken)
    if len(dataset.categories) != model.config.num_classes:
        raise ConfigError(
            f"{dataset.name} has {len(dataset.categories)} categories, but the model knows "
            f"{model.config.num_classes} classes"
        )
    on_gpu = own.device.type == "cuda"
    batches = eval_loader(
        dataset, config, rank=own.rank, world_size=own.world_size, pin_memory=on_gpu
    )
    return evaluate_model(
        model,
        batches,
        dataset,
        device=own.device,
        autocast=AUTOCAST_DTYPES.get(config.precision),
        folder=folder,
    )


def _train(trainer: Trainer, dataset: CocoDataset, folder: RunFolder) -> None:
    """Take every step that is left, with the checkpoints and evaluations that fall due."""
    config, own = trainer.config, trainer.worker
    iterations = range(trainer.iteration, config.solver.max_iterations)
    loader = train_loader(
        dataset,
        config,
        first_iteration=trainer.iteration,
        rank=own.rank,
        world_size=own.world_size,
        pin_memory=own.device.type == "cuda",
    )
    batches = iter(loader)
    with TrainingReport(folder.path, config.log_period, iterations, own) as report:
        for iteration in iterations:
            with report.waiting_for_data():
                parts = list(itertools.islice(batches, config.solver.accumulate))
            losses = trainer.step([part.to(own.device, non_blocking=True) for part in parts])
            report.record(iteration, losses, learning_rate(config.solver, iteration))
            final = trainer.iteration == config.solver.max_iterations
            metrics = {}
            if _evaluation_is_due(config, trainer.iteration):
                metrics = evaluate(trainer.model, config, own, folder.path)
                report.record_metrics(trainer.iteration, metrics)
            if final or trainer.iteration % config.checkpoint_period == 0:
                _check_weights(trainer)
                if own.is_main:
                    folder.save(_checkpoint_from(trainer, dataset, metrics), final=final)


def _evaluation_is_due(config: TrainConfig, iteration: int) -> bool:
    settings = config.evaluation
    if settings.skip_test or config.data.val is None:
        return False
    final = iteration == config.solver.max_iterations
    return final or (settings.period > 0 and iteration % settings.period == 0)


def _check_weights(trainer: Trainer) -> None:
    """Keep what cannot be resumed out of the checkpoints.

    Raises:
        DivergenceError: a weight is not finite.
    """
    if not all(weight.isfinite().all() for weight in trainer.model.parameters()):
        raise DivergenceError(f"a weight was not finite after iteration {trainer.iteration}")


def _checkpoint_from(
    trainer: Trainer, dataset: CocoDataset, metrics: dict[str, float]
) -> Checkpoint:
    config = trainer.config
    return Checkpoint(
        model_config=config.model,
        weights=trainer.model.state_dict(),
        categories=dataset.categories,
        preprocessing=Preprocessing(
            min_size=config.data.min_size,
            max_size=config.data.max_size,
            pixel_mean=config.model.pixel_mean,
            pixel_std=config.model.pixel_std,
        ),
        buckets=config.data.buckets,
        iteration=trainer.iteration,
        metrics=metrics,
        training_state=trainer.state(),
    )


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

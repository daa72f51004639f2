"""Entry points for training a model and for evaluating a checkpoint."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path

from ..model.atomic_files import atomic_write, check_creatable
from ..model.checkpoint import Checkpoint, load_checkpoint
from ..model.config.reference import text_from_value
from ..model.shell_commands import shell_path
from .classes import set_classes_from_dataset
from .config import ConfigError, TrainConfig, load_config, yaml_from_config
from .config_sources import CONFIG_FILE
from .data.coco.training_set import load_training_set
from .devices import processes_to_start
from .distributed import Worker, worker
from .early_stopping import restored_evaluation
from .evaluation.config import load_evaluation_config, warn_of_other_sizes
from .evaluation.validation import Validation, check_expected
from .interruption import TrainingInterrupted
from .loop import TrainingLoop
from .reporting import LOG_FILE
from .resume_checks import check_resumable, run_identity, with_initial_weights
from .run_folder import RunFolder, create_output_folder
from .run_length import with_run_length
from .terminal import terminal_progress
from .tracking import check_trackers
from .trainer import Trainer, check_precision, set_arithmetic

logger = logging.getLogger(__name__)


def run_training(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train a model, or resume the run in `output_dir`. Call it in every process of `torchrun`.

    Returns:
        Path of the final checkpoint.

    Raises:
        ConfigError: `config` is not a `TrainConfig`, or does not fit the data, the machine or the
            resumed run. `resume` is not a `bool`. The configuration requires several processes, but
            `torchrun` or `maskrcnn train` did not start them. A tracker is not installed or cannot
            start. `output_dir` cannot be created or written, or contains a run although `resume` is
            False, or another process trains in it.
        DataError: The data set is unreadable or has no usable image, or `solver.images_per_batch`
            is not divisible by ranks times `solver.accumulate`.
        CheckpointError: The initial weights or the last checkpoint cannot be read.
        ZooError: The published model that `weights` names does not exist, or is not supported.
        DownloadError: The download of the initial weights failed.
        DivergenceError: A loss or a weight is not finite, or the fp16 loss scale is too small.
        GpuMemoryError: A step or an evaluation needs more memory than the GPU has.
        RankLostError: Another rank ended, or did not answer for 30 minutes.
        ExpectationError: A final metric is missing, or is below its value in `evaluation.expected`
            by more than `evaluation.tolerance`.
        TrainingInterrupted: SIGINT or SIGTERM ended the run. A checkpoint was written.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"config is {config!r}; give a TrainConfig, such as load_config('quick')")
    if not isinstance(resume, bool):
        raise ConfigError(f"resume is {resume!r}; give True or False")
    if (count := processes_to_start(config.device, config.processes)) > 1:
        raise ConfigError(
            f"{count} training processes are configured, but run_training() cannot start them; use "
            "the command `maskrcnn train` or torchrun"
        )
    with worker(config.device) as rank:
        checkpoint, metrics = train(config, rank, resume=resume)
    check_expected(config.evaluation, metrics)
    return checkpoint


def evaluate_checkpoint(
    checkpoint: str | Path,
    source: str | Path,
    overrides: Sequence[str] = (),
    report: str | Path | None = None,
) -> dict[str, float]:
    """Evaluate a checkpoint on a validation set. Call it in every process of `torchrun`.

    Detections and metrics are also written to `output_dir/inference`. `evaluation.expected` is not
    checked.

    Args:
        checkpoint: Checkpoint file to evaluate, such as `model_final.pth`.
        source: YAML file or name of a preset, with the validation set `data.val`. Its section
            `model` is ignored, because the checkpoint defines the model.
        overrides: Overrides of the form `key.path=value`. In section `model`, they may change only
            keys that do not affect training, such as `model.roi.score_threshold`.
        report: HTML file for a report; its name must end in `.html`. None: write no report.

    Returns:
        Metrics by name, such as `bbox/AP` and `segm/AP`.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: The configuration is invalid. There is no validation set, or it has categories
            that the checkpoint lacks. Or `output_dir` or `report` cannot be created or written.
        DataError: The validation set is unreadable.
        GpuMemoryError: A batch needs more memory than the GPU has.
        RankLostError: Another rank ended, or did not answer for 30 minutes.
    """
    loaded = load_checkpoint(Path(checkpoint))
    config = load_evaluation_config(source, overrides, loaded)
    with worker(config.device) as rank:
        return evaluate_loaded(loaded, config, rank, None if report is None else Path(report))


def evaluate_loaded(
    checkpoint: Checkpoint, config: TrainConfig, rank: Worker, report: Path | None = None
) -> dict[str, float]:
    """Evaluate a loaded checkpoint on this rank. Call it on every rank.

    Args:
        checkpoint: Checkpoint to evaluate.
        config: Configuration from `load_evaluation_config`.
        rank: Rank of this process.
        report: HTML file for a report; its name must end in `.html`. None: write no report.

    Returns:
        Metrics by name, the same on all ranks.

    Raises:
        ConfigError: There is no validation set, or it has categories that the checkpoint lacks. Or
            `output_dir` or `report` cannot be created or written.
        DataError: The validation set is unreadable.
        GpuMemoryError: A batch needs more memory than the GPU has.
    """
    create_output_folder(config.output_dir)
    if report is not None:
        try:
            check_creatable(report, ".html")
        except OSError as error:
            raise ConfigError(
                f"cannot write the report {report}: {error.strerror}; choose another path"
            ) from None
    set_arithmetic(config)
    with terminal_progress(rank) as progress:
        if rank.is_main:
            warn_of_other_sizes(config.data, checkpoint)
        validation = Validation(config, checkpoint.categories, rank)
        model = replace(checkpoint, model_config=config.model).build_model()
        return validation.measure(model.to(rank.device), progress, report)


def train(config: TrainConfig, rank: Worker, *, resume: bool) -> tuple[Path, dict[str, float]]:
    """Train a model on this rank, or resume the run in `config.output_dir`. Call it on every rank.

    Raises the errors of `run_training`, with two differences:

    - `ExpectationError` is never raised, because `evaluation.expected` is not checked.
    - If another rank is lost, torch's `RuntimeError` is raised. The context manager
      `distributed.worker` converts it to `RankLostError`.

    Returns:
        Path of the final checkpoint, and its metrics by name. The metrics are empty if the
        checkpoint was not evaluated.
    """
    check_precision(config, rank.device)
    set_arithmetic(config)
    check_trackers(config.trackers)
    folder = RunFolder(config.output_dir, config.keep_checkpoints)
    last = folder.open(resume=resume)
    with (
        folder.locked() if rank.is_main else nullcontext(),
        terminal_progress(rank, config.output_dir / LOG_FILE) as progress,
    ):
        dataset = load_training_set(config.data)
        config = with_run_length(dataset, set_classes_from_dataset(dataset, config))
        if last is not None:
            config = with_initial_weights(config, last)
        identity = run_identity(config, dataset)
        if last is not None:
            # Check on every rank, because each host may have its own copy of the data.
            check_resumable(last, identity, dataset.name)
        stopping, metrics = restored_evaluation(config, last)
        has_ended = last is not None and (
            last.iteration >= config.solver.max_iterations or stopping.reason(metrics) is not None
        )
        # If the run has ended, keep its recorded configuration, because nothing is trained with the
        # new one.
        if rank.is_main and not has_ended:
            _record(config)
        if last is not None:
            # Do not read the initial weights. Their file may no longer exist, and the checkpoint
            # holds the current weights.
            config = config.model_copy(update={"weights": None})
        trainer = Trainer(config, rank)
        if last is not None:
            trainer.load_state(last)
            if trainer.iteration >= config.solver.max_iterations:
                logger.info(
                    "the run has already ended at iteration %d; to train longer, set "
                    "solver.max_iterations to a larger number",
                    trainer.iteration,
                )
            elif not has_ended:
                logger.info("resuming the run at iteration %d", trainer.iteration)
        try:
            loop = TrainingLoop(trainer, dataset, folder, identity, progress, stopping, metrics)
            metrics = loop.run()
        except TrainingInterrupted:
            # Do not wait for the other ranks here. In an evaluation, they may wait for this rank in
            # another collective operation, which fails when this process ends.
            logger.info(
                "interrupted after iteration %d of %d; to continue from %s, repeat the command "
                "with --resume, or run `maskrcnn train %s --resume`",
                trainer.iteration,
                config.solver.max_iterations,
                folder.last(),
                shell_path(config.output_dir / CONFIG_FILE),
            )
            raise
        # Rank 0 writes the checkpoint. The other ranks must not return before it exists.
        rank.wait_for_ranks()
        return folder.last(), metrics


def _record(config: TrainConfig) -> None:
    """Write the configuration to `output_dir/config.yaml` and log its section `solver`.

    If the file exists, and `_is_generated` returns False for it, a user has probably written or
    edited the file. It is then renamed first.
    """
    path = config.output_dir / CONFIG_FILE
    if path.exists() and not _is_generated(path):
        names = (path.with_stem(f"{path.stem}-original-{number}") for number in count(1))
        kept = next(name for name in names if not name.exists())
        path.replace(kept)
        logger.info(
            "the run writes all its settings to %s; renamed the older file to %s", path, kept
        )
    with atomic_write(path) as file:
        file.write(yaml_from_config(config).encode())
    solver = config.solver.model_dump()
    logger.info("solver: %s", " ".join(f"{k}={text_from_value(v)}" for k, v in solver.items()))


def _is_generated(path: Path) -> bool:
    """Return whether a configuration file has the text that `_record` writes for its values."""
    try:
        return yaml_from_config(load_config(path)) == path.read_text()
    except (ConfigError, OSError, ValueError):
        return False

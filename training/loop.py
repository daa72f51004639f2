"""Training loop: optimiser steps, evaluations, checkpoints and early stopping."""

import itertools
import logging
from typing import Any

import torch
from rich.progress import Progress

from ..model.bundle.manifest import Preprocessing
from ..model.checkpoint import Checkpoint
from .data.coco.dataset import CocoDataset, DataError
from .data.loading.device_batches import prefetch_batches
from .data.loading.loader import train_loader
from .early_stopping import BEST_BY, EarlyStopping
from .evaluation.validation import Validation, check_evaluation, log_metrics
from .interruption import Interruption, TrainingInterrupted
from .reporting import DivergenceError, TrainingReport, check_loss_scale
from .run_folder import RunFolder
from .schedule import learning_rate
from .tracking import open_trackers
from .trainer import Trainer

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Training loop of a new or resumed run, on one rank."""

    def __init__(
        self,
        trainer: Trainer,
        dataset: CocoDataset,
        folder: RunFolder,
        identity: dict[str, Any],
        progress: Progress,
        stopping: EarlyStopping,
        metrics: dict[str, float],
    ) -> None:
        """Create the training data loader and read the validation set.

        Args:
            trainer: Model and optimiser, new or restored from the last checkpoint.
            dataset: Training set.
            folder: Folder for checkpoints.
            identity: Result of `run_identity`: configuration, and hashes of the training set. It is
                stored in each checkpoint.
            progress: Progress bars from `terminal_progress`.
            stopping: Early-stopping state, new or restored from the last checkpoint.
            metrics: Metrics of the last checkpoint. Empty: the run is new, or the checkpoint was
                not evaluated on this validation set.

        Raises:
            ConfigError: The model lacks a category of the validation set, or the validation set has
                no objects for a metric in `evaluation.expected`. Or `evaluation.expected` or an
                early-stopping key is set, but the run computes no metrics. With
                `evaluation.skip_test`, early-stopping keys have no effect and are accepted.
            DataError: The validation set is unreadable, there is no image to train on, or
                `solver.images_per_batch` is not divisible by ranks times `solver.accumulate`.
        """
        self._trainer = trainer
        self._config = config = trainer.config
        self._dataset = dataset
        self._folder = folder
        self._identity = identity
        self._progress = progress
        worker = trainer.worker
        self._batches = train_loader(
            dataset,
            config,
            first_iteration=trainer.iteration,
            rank=worker.rank,
            world_size=worker.world_size,
            pin_memory=worker.device.type == "cuda",
        )
        self._epoch = self._batches.iterations_per_epoch
        self._stopping, self._metrics = stopping, metrics
        self._interruption = Interruption()
        self._saved_iteration = trainer.iteration
        self._validation = None
        if config.data.val is not None and not config.evaluation.skip_test:
            self._validation = Validation(config, dataset.categories, worker)
        check_evaluation(config, self._validation.dataset if self._validation else None)

    def run(self) -> dict[str, float]:
        """Train until `solver.max_iterations` or an early stop. Save checkpoints on the way.

        If the checkpoint to resume from lacks the metrics of an evaluation that was due, the run
        begins with this evaluation.

        Returns:
            Metrics of the final model by name. The dictionary is empty if it was not evaluated.

        Raises:
            DataError: An image is unreadable and `data.on_broken` is "refuse", or all images of a
                shape bucket (input size) are unreadable. If a training batch cannot be loaded after
                the first step, a run with one rank writes a checkpoint before it raises the error.
            ConfigError: A tracker cannot start, or a result file cannot be written.
            DivergenceError: A loss or a weight is not finite, or the fp16 loss scale is too small.
            GpuMemoryError: A step or an evaluation needs more memory than the GPU has.
            TrainingInterrupted: SIGINT or SIGTERM ended the run. A checkpoint was written.
        """
        trainer, config = self._trainer, self._config
        if self._stops_early():
            return self._metrics
        iterations = range(trainer.iteration, config.solver.max_iterations)
        batches = prefetch_batches(trainer.worker.device, self._batches)
        worker = trainer.worker
        trackers = open_trackers(config, iterations.start) if worker.is_main else ()
        report = TrainingReport(
            self._folder.path,
            config.log_period,
            iterations,
            worker,
            self._progress,
            trainer.scaler,
            trackers,
            is_evaluated=not self._evaluation_was_missed(),
        )
        with report, self._interruption:
            if self._evaluation_was_missed() and self._evaluate_and_save(report):
                return self._metrics
            for iteration in iterations:
                self._freeze_if_due(iteration)
                try:
                    with report.waiting_for_data():
                        parts = list(itertools.islice(batches, config.solver.accumulate))
                except DataError as error:
                    raise self._saved_before(error) from error
                losses = trainer.step(parts)
                report.record(iteration, losses, learning_rate(config.solver, iteration))
                if self._evaluate_and_save(report):
                    break
                # With several ranks, the check for interruptions is an all-reduce, which makes the
                # host wait for the device. Therefore, check only every `log_period` iterations.
                if worker.world_size == 1 or trainer.iteration % config.log_period == 0:
                    self._stop_if_interrupted()
        self._batches.warn_of_skipped()
        return self._metrics

    def _freeze_if_due(self, iteration: int) -> None:
        epochs = self._config.solver.freeze_backbone_after_epoch
        if epochs is not None and iteration >= epochs * self._epoch:
            self._trainer.freeze_backbone()

    def _evaluate_and_save(self, report: TrainingReport) -> bool:
        """Evaluate and save the model, each if it is due. Return whether training ends.

        A checkpoint is written with each evaluation, every `checkpoint_period` iterations, and at
        the end of training. If no evaluation is due, but `Validation.drawing_is_due` is True, a PNG
        file that shows detections on validation images is written.
        """
        trainer, config = self._trainer, self._config
        final = trainer.iteration >= config.solver.max_iterations
        best, self._metrics = False, {}
        if self._validation is not None and self._evaluation_is_due(final):
            # Save first, because an evaluation can fail, be killed or be interrupted. A resumed run
            # then begins with this evaluation.
            self._save(final=final)
            self._metrics = self._evaluate(self._validation, report)
            if self._metrics:
                best = self._stopping.record(self._metrics)
            final = self._stops_early() or final
        elif self._validation is not None and self._validation.drawing_is_due(trainer.iteration):
            with report.evaluating():
                self._validation.draw(trainer.evaluated_model, trainer.iteration)
            report.record_drawing(trainer.iteration, self._validation.drawing(trainer.iteration))
        if best:
            score = self._metrics[BEST_BY]
            logger.info("%s %.4f is the best of this run so far", BEST_BY, score)
        if final or self._metrics or trainer.iteration % config.checkpoint_period == 0:
            self._save(final=final, best=best)
        return final

    def _evaluate(self, validation: Validation, report: TrainingReport) -> dict[str, float]:
        # With several ranks, the check for interruptions is an all-reduce, which completes only
        # after rank 0 has written the checkpoint. Afterwards, a signal may end each rank at once.
        self._stop_if_interrupted()
        self._trainer.share_statistics()
        with report.evaluating(), self._interruption.immediate():
            metrics = validation.measure(
                self._trainer.evaluated_model, self._progress, iteration=self._trainer.iteration
            )
        log_metrics(metrics)
        iteration = self._trainer.iteration
        report.record_metrics(iteration, metrics)
        report.record_drawing(iteration, validation.drawing(iteration))
        return metrics

    def _stop_if_interrupted(self) -> None:
        """After SIGINT or SIGTERM, write a checkpoint and raise `TrainingInterrupted`.

        Every rank must call this method. If one rank received a signal, all ranks stop.
        """
        stops, worker = self._interruption.requested, self._trainer.worker
        if worker.world_size > 1:
            # Ranks receive a signal at different times, but must stop after the same iteration.
            stops = bool(worker.sum_over_ranks(torch.tensor(float(stops), device=worker.device)))
        if not stops:
            return
        if self._saved_iteration != self._trainer.iteration:
            self._save(final=False)
        # Rank 0 writes the checkpoint. If another rank ended before the checkpoint exists, the
        # launcher would end rank 0 too.
        worker.wait_for_ranks()
        raise TrainingInterrupted

    def _saved_before(self, error: DataError) -> DataError:
        """Write a checkpoint before `error` ends the run. Return the error with advice to resume.

        With several ranks, or before the first step, write nothing, and return `error` unchanged.
        """
        trainer = self._trainer
        # All ranks must take part in a checkpoint, but the others do not know of the error.
        if trainer.worker.world_size > 1 or not trainer.iteration:
            return error
        if self._saved_iteration != trainer.iteration:
            self._save(final=False)
        return DataError(
            f"{error}; the run was saved after iteration {trainer.iteration}: to continue, correct "
            "the data, and repeat the command with --resume"
        )

    def _evaluation_is_due(self, final: bool) -> bool:
        settings, iteration = self._config.evaluation, self._trainer.iteration
        after_epoch = settings.per_epoch and iteration % self._epoch == 0
        return final or after_epoch or (settings.period > 0 and iteration % settings.period == 0)

    def _evaluation_was_missed(self) -> bool:
        """Whether the checkpoint to resume from has no metrics, but should have been evaluated."""
        trainer, config = self._trainer, self._config
        # With `skip_eval`, a checkpoint never has metrics. The evaluation is then repeated, because
        # it may have been killed before it wrote all detections.
        if not trainer.iteration or self._metrics or self._validation is None:
            return False
        return self._evaluation_is_due(trainer.iteration >= config.solver.max_iterations)

    def _stops_early(self) -> bool:
        reason = self._stopping.reason(self._metrics)
        if reason is not None:
            logger.info(
                "early stop at iteration %d of %d: %s; to train longer, resume with other values "
                "of evaluation.patience, min_bbox_ap and min_mask_ap",
                self._trainer.iteration,
                self._config.solver.max_iterations,
                reason,
            )
        return reason is not None

    def _save(self, *, final: bool, best: bool = False) -> None:
        """Write a checkpoint on rank 0. Every rank must call this method.

        `final`: name the file `model_final.pth`. `best`: write `model_best.pth` too.

        Raises:
            DivergenceError: A weight is not finite, or the fp16 loss scale is too small.
        """
        trainer, config = self._trainer, self._config
        check_loss_scale(trainer.scaler, trainer.iteration)
        if not all(weight.isfinite().all() for weight in trainer.model.parameters()):
            raise DivergenceError(
                f"a weight was NaN or infinite after iteration {trainer.iteration}"
            )
        checkpoint = Checkpoint(
            model_config=config.model,
            weights=trainer.evaluated_model.state_dict(),
            categories=self._dataset.categories,
            preprocessing=Preprocessing(
                min_size=config.data.min_size,
                max_size=config.data.max_size,
                resize=config.data.resize,
                pixel_mean=config.model.pixel_mean,
                pixel_std=config.model.pixel_std,
            ),
            buckets=config.data.buckets,
            iteration=trainer.iteration,
            metrics=self._metrics,
            training_state={
                **trainer.state(),
                **self._stopping.state(),
                "identity": self._identity,
            },
        )
        self._saved_iteration = trainer.iteration
        if trainer.worker.is_main:
            self._folder.save(checkpoint, final=final, best=best)

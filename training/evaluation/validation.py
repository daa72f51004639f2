"""Evaluate on the validation set, and check early-stopping targets and expected metrics."""

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import Progress

from ...model.bundle.manifest import Category
from ...model.mask_rcnn import MaskRCNN
from ..config import ConfigError, EvaluationConfig, TrainConfig
from ..data.coco.categories import with_ids_of
from ..data.coco.dataset import CocoDataset
from ..data.coco.training_set import relabelled
from ..data.loading.loader import BatchLoader, eval_loader
from ..distributed import Worker
from ..reporting import with_progress
from ..trainer import AUTOCAST_DTYPES, GpuMemoryError
from .coco_curves import IOU_TYPES
from .coco_metrics import IOU_TITLES, summary_lines
from .evaluator import CocoEvaluator, evaluate_model, validation_losses
from .result_files import RESULTS_FOLDER

logger = logging.getLogger(__name__)


class _Size(NamedTuple):
    """Range of object sizes in COCO metrics, as areas in square pixels."""

    minimum: float
    maximum: float
    text: str


# By the last letter of the metrics of the size: APs and ARs, APm and ARm, APl and ARl.
_SIZES = {
    "s": _Size(0, 32**2, "at most 1024"),
    "m": _Size(32**2, 96**2, "1024 to 9216"),
    "l": _Size(96**2, math.inf, "at least 9216"),
}

# In `output_dir`: folder for PNG files that show detections on validation images, and PNG file that
# joins some of these files.
_DRAWINGS_FOLDER = "validation_images"
PROGRESS_FILE = "progress.png"
# Fractions of a run after which these PNG files are written even if no evaluation is due.
_DRAWN_AFTER = (0.1, 0.3, 1.0)


class ExpectationError(Exception):
    """A metric is missing, or too far below its value in `evaluation.expected`."""


class Validation:
    """Evaluation of models on the attribute `dataset`, the validation set `data.val`."""

    def __init__(self, config: TrainConfig, categories: Sequence[Category], worker: Worker) -> None:
        """Read the annotations of the validation set.

        Args:
            config: Configuration of the run.
            categories: Classes of the models by label; label 1 is the first.
            worker: Rank of this process.

        Raises:
            ConfigError: `data.val` is not set, or has categories that the models lack.
            DataError: The data set is missing or invalid.
        """
        if config.data.val is None:
            raise ConfigError("no validation set; set data.val.images and data.val.annotations")
        self.dataset = CocoDataset(config.data.val, config.data.on_broken)
        self._categories = with_ids_of(self.dataset, categories)
        if worker.is_main and not any(record.objects for record in self.dataset.records):
            logger.warning("%s has no objects, so AP cannot be measured", self.dataset.name)
        self._config = config
        self._worker = worker

    def measure(
        self,
        model: MaskRCNN,
        progress: Progress,
        report: Path | None = None,
        iteration: int = 0,
    ) -> dict[str, float]:
        """Evaluate a model. Write detections, metrics and images with detections to `output_dir`.

        Call this method on every rank.

        Args:
            model: Model to evaluate. It is not changed.
            progress: Progress bars from `terminal_progress`.
            report: HTML file for a report. None: write no report.
            iteration: Number of completed training iterations. 0: unknown. The PNG file that shows
                detections is named after this number.

        Returns:
            Metrics by name, the same on all ranks. The dictionary is empty if
            `evaluation.skip_eval` is set.

        Raises:
            ConfigError: A result file cannot be written.
            GpuMemoryError: A batch needs more memory than the GPU has.
        """
        config, worker = self._config, self._worker
        settings = config.evaluation
        evaluator = CocoEvaluator(self.dataset, self._categories, worker, settings.evaluator)
        loader = self._loader()
        batches = with_progress(loader, len(loader), progress, "evaluating")
        autocast = AUTOCAST_DTYPES.get(config.precision)
        with self._memory_errors():
            evaluate_model(model, batches, evaluator, worker.device, autocast)
        self.draw(model, iteration)
        folder = config.output_dir / RESULTS_FOLDER
        measure = not settings.skip_eval
        metrics = evaluator.evaluate(folder, measure=measure, report=report)
        if settings.losses and measure:
            loader = self._loader(ground_truth=True)
            batches = with_progress(loader, len(loader), progress, "validation loss")
            with self._memory_errors():
                metrics |= validation_losses(model, batches, worker, autocast)
        return metrics

    def drawing_is_due(self, iteration: int) -> bool:
        """Whether `draw` must be called after `iteration` iterations even without an evaluation.

        True after 10 %, 30 % and 100 % of the run's iterations, if `evaluation.draw_images` is set.
        """
        return bool(self._config.evaluation.draw_images) and iteration in self._drawing_iterations()

    def draw(self, model: MaskRCNN, iteration: int) -> None:
        """On rank 0, write a PNG file that shows a model's detections on some validation images.

        The key `evaluation.draw_images` is the number of images. If it is 0, write nothing. After
        10 %, 30 % and 100 % of the run's iterations, also write `progress.png`, which stacks the
        PNG files that exist so far for these iterations.

        Args:
            model: Model to evaluate. It is not changed.
            iteration: Number of completed training iterations. 0: unknown.

        Raises:
            GpuMemoryError: A batch needs more memory than the GPU has.
        """
        config, worker = self._config, self._worker
        if not config.evaluation.draw_images or not worker.is_main:
            return
        from .drawn_images import chosen_images, draw_detections, join_drawings  # slow import

        chosen = chosen_images(self.dataset, config.evaluation.draw_images)
        evaluator = CocoEvaluator(chosen, self._categories, worker)
        # Few images need no data-loading processes, which take seconds to start.
        data = config.data.model_copy(update={"workers": 0})
        batches = eval_loader(chosen, config.model_copy(update={"data": data}))
        autocast = AUTOCAST_DTYPES.get(config.precision)
        with self._memory_errors():
            evaluate_model(model, batches, evaluator, worker.device, autocast)
        title = f"detected after {iteration} iterations" if iteration else "detected"
        draw_detections(chosen, evaluator.mask_results(), title, self.drawing(iteration))
        iterations = self._drawing_iterations()
        if iteration in iterations:
            join_drawings(map(self.drawing, iterations), config.output_dir / PROGRESS_FILE)

    def _drawing_iterations(self) -> list[int]:
        length = self._config.solver.max_iterations
        return sorted({max(1, round(share * length)) for share in _DRAWN_AFTER})

    def drawing(self, iteration: int) -> Path:
        """Return the path of the PNG file with detections that `draw` writes at `iteration`."""
        return self._config.output_dir / _DRAWINGS_FOLDER / f"{iteration:07d}.png"

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Convert torch's out-of-memory error in a `with` block to `GpuMemoryError`."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            images = self._config.evaluation.images_per_batch
            keys = (
                "evaluation.images_per_batch" if images > 1 else "data.min_size and data.max_size"
            )
            raise GpuMemoryError(
                f"out of GPU memory in an evaluation (images per batch: {images}); lower {keys}"
            ) from error

    def _loader(self, *, ground_truth: bool = False) -> BatchLoader:
        worker, dataset = self._worker, self.dataset
        if ground_truth:
            # The losses need the model's labels, which can differ from those of the data set.
            labels = {category: label for label, category in enumerate(self._categories, start=1)}
            new_labels = [labels[category] for category in dataset.categories]
            dataset = copy.copy(dataset)
            dataset.records = tuple(relabelled(record, new_labels) for record in dataset.records)
        return eval_loader(
            dataset,
            self._config,
            ground_truth=ground_truth,
            rank=worker.rank,
            world_size=worker.world_size,
            pin_memory=worker.device.type == "cuda",
        )


def log_metrics(metrics: dict[str, float]) -> None:
    """Log box and mask metrics in pycocotools' format. If there are no metrics, log nothing."""
    for iou_type in IOU_TYPES if metrics else ():
        logger.info("%s AP and AR", IOU_TITLES[iou_type])
        for line in summary_lines(metrics, iou_type):
            logger.info(line)


def reached_targets(settings: EvaluationConfig, metrics: dict[str, float]) -> str | None:
    """Check metrics against the early-stopping targets `min_bbox_ap` and `min_mask_ap`.

    Returns:
        Text for the log, if all targets that are set are reached. None: a target is not reached, or
        no target is set.
    """
    all_targets = {"bbox/AP": settings.min_bbox_ap, "segm/AP": settings.min_mask_ap}
    targets = {name: target for name, target in all_targets.items() if target is not None}
    if not targets or any(metrics.get(name, -1) < target for name, target in targets.items()):
        return None
    return " and ".join(
        f"{name} {metrics[name]:.4f} is at least {target}" for name, target in targets.items()
    )


def check_evaluation(config: TrainConfig, dataset: CocoDataset | None) -> None:
    """Check that a training can measure the metrics that its configuration needs.

    Args:
        config: Configuration of the training.
        dataset: Validation set `config.data.val`. None: there is none.

    Raises:
        ConfigError: `evaluation.expected` or an early-stopping key is set, but the training
            computes no metrics, or the validation set lacks objects for an expected metric.
    """
    settings = config.evaluation
    if settings.expected and (dataset is None or settings.skip_test):
        raise ConfigError(
            "evaluation.expected needs an evaluation; set data.val and remove "
            "evaluation.skip_test, or set evaluation.expected={}"
        )
    # With `skip_test`, the early-stopping keys have no effect, so they need no metrics.
    computes_metrics = config.data.val is not None and not settings.skip_eval
    if settings.stops_early and not (computes_metrics or settings.skip_test):
        raise ConfigError(
            "evaluation.min_bbox_ap, min_mask_ap and patience need metrics; set data.val and "
            "remove evaluation.skip_eval, or set these keys to null"
        )
    for metric in settings.expected:
        assert dataset is not None
        _check_measurable(metric, dataset)


def _check_measurable(metric: str, dataset: CocoDataset) -> None:
    """Check that a data set has objects of the class or the size of a metric."""
    classes = [category.name for category in dataset.categories]
    objects = [own for record in dataset.records for own in record.objects]
    _, _, name = metric.partition("/AP/")
    if name and name not in classes:
        raise ConfigError(
            f"evaluation.expected has the metric {metric}, but {dataset.name} has no "
            f"category {name!r}; its categories are {', '.join(map(repr, classes))}"
        )
    if name:
        missing = f"objects of the category {name!r}"
        is_measurable = any(classes[own.label - 1] == name for own in objects)
    elif size := _SIZES.get(metric[-1]):
        missing = f"objects of {size.text} square pixels"
        is_measurable = any(size.minimum <= own.area <= size.maximum for own in objects)
    else:
        missing, is_measurable = "objects", bool(objects)
    if not is_measurable:
        raise ConfigError(
            f"evaluation.expected has the metric {metric}, but {dataset.name} has no {missing}; "
            "annotate some, or remove the metric"
        )


def check_expected(settings: EvaluationConfig, metrics: dict[str, float]) -> None:
    """Check metrics against `evaluation.expected`.

    Raises:
        ExpectationError: A metric is missing, or is below its expected value by more than
            `evaluation.tolerance`.
    """
    misses = [
        f"{name} is {metrics[name]:.4f}" if name in metrics else f"{name} was not computed"
        for name in settings.expected
        if metrics.get(name, -1) < settings.expected[name] - settings.tolerance
    ]
    if misses:
        expected = ", ".join(f"{name} {value}" for name, value in settings.expected.items())
        raise ExpectationError(
            f"{', '.join(misses)}, but evaluation.expected requires {expected} with a tolerance of "
            f"{settings.tolerance}"
        )

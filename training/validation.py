"""The validation set of a run, and what a run demands of the metrics on it."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.progress import Progress

from ..model.manifest import Category
from ..model.mask_rcnn import MaskRCNN
from .classes import check_categories
from .coco_metrics import IOU_TITLES, IOU_TYPES, summary_lines
from .config import ConfigError, EvaluationConfig, TrainConfig
from .data.batches import Batch, EncodedBatch
from .data.coco import CocoDataset
from .data.loader import BatchLoader, eval_loader
from .distributed import Worker
from .evaluation import CocoEvaluator, evaluate_model
from .evaluation_files import FOLDER
from .trainer import AUTOCAST_DTYPES

logger = logging.getLogger(__name__)


class ExpectationError(Exception):
    """An evaluation fell short of what was expected."""


class Validation:
    """Measures a model on the validation set of a configuration."""

    def __init__(self, config: TrainConfig, categories: Sequence[Category], worker: Worker) -> None:
        """Read the validation set.

        Args:
            config: names it.
            categories: classes of the model; label 1 is the first.
            worker: this process.

        Raises:
            ConfigError: there is none, or one with categories that the model does not know.
            DataError: it cannot be used.
        """
        if config.data.val is None:
            raise ConfigError(
                "there is no validation set; set data.val.images and data.val.annotations"
            )
        self._dataset = CocoDataset(config.data.val, config.data.on_broken)
        check_categories(self._dataset, categories)
        self._config = config
        self._categories = categories
        self._worker = worker

    @property
    def folder(self) -> Path:
        """Where `evaluation_files` are written."""
        return self._config.output_dir / FOLDER

    def measure(self, model: MaskRCNN, progress: Progress) -> dict[str, float]:
        """Metrics of a model, on every rank; none where `evaluation.skip_eval` is set.

        Args:
            model: left as it was.
            progress: where a bar is shown; its tasks have a field `note`.
        """
        config, worker = self._config, self._worker
        evaluator = CocoEvaluator(
            self._dataset, self._categories, worker, config.evaluation.evaluator
        )
        loader = eval_loader(
            self._dataset,
            config,
            rank=worker.rank,
            world_size=worker.world_size,
            pin_memory=worker.device.type == "cuda",
        )
        batches = _followed(loader, progress)
        autocast = AUTOCAST_DTYPES.get(config.precision)
        evaluate_model(model, batches, evaluator, worker.device, autocast)
        return evaluator.evaluate(self.folder, measure=not config.evaluation.skip_eval)


def _followed(loader: BatchLoader, progress: Progress) -> Iterator[Batch | EncodedBatch]:
    """Batches, with a bar that is there until the last one is done."""
    task = progress.add_task("evaluating", total=len(loader), note="")
    for batch in loader:
        yield batch
        progress.advance(task)
    progress.remove_task(task)


def log_metrics(metrics: dict[str, float]) -> None:
    """Say in the log what an evaluation measured, as COCO prints it."""
    for iou_type in IOU_TYPES if metrics else ():
        logger.info("%s AP and AR", IOU_TITLES[iou_type])
        for line in summary_lines(metrics, iou_type):
            logger.info(line)


def reached_targets(settings: EvaluationConfig, metrics: dict[str, float]) -> str | None:
    """Which targets of an early stop an evaluation has reached; none, unless all that are set."""
    targets = {"bbox/AP": settings.min_bbox_ap, "segm/AP": settings.min_mask_ap}
    demanded = {name: target for name, target in targets.items() if target is not None}
    if not demanded or any(metrics.get(name, -1) < target for name, target in demanded.items()):
        return None
    return " and ".join(
        f"{name} {metrics[name]:.4f} is at least {target}" for name, target in demanded.items()
    )


def check_expected(settings: EvaluationConfig, metrics: dict[str, float]) -> None:
    """Hold metrics to `evaluation.expected`.

    Raises:
        ExpectationError: a metric is lower by more than `evaluation.tolerance`, or unknown.
    """
    misses = [
        f"{name} is {metrics[name]:.4f}" if name in metrics else f"{name} was not measured"
        for name in settings.expected
        if metrics.get(name, -1) < settings.expected[name] - settings.tolerance
    ]
    if misses:
        wanted = ", ".join(f"{name} {value}" for name, value in settings.expected.items())
        raise ExpectationError(
            f"{', '.join(misses)}, but evaluation.expected asks for {wanted}, less "
            f"{settings.tolerance} at most"
        )

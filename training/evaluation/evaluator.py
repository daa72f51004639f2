"""COCO evaluation of a model, with the images distributed over all ranks."""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...model.bundle.manifest import Category
from ...model.losses import LOSS_NAMES, LossTerms
from ...model.mask_rcnn import MaskRCNN
from ...model.plurals import counted
from ..config import ConfigError, EvaluatorName
from ..data.coco.dataset import CocoDataset
from ..data.loading.batches import Batch, EncodedBatch
from ..data.loading.device_batches import prefetch_batches
from ..distributed import Worker
from .candidate_limit import LimitedImages
from .coco_metrics import coco_metrics
from .detections import ImageDetections, image_detections_from
from .result_files import coco_results_from, write_detections, write_metrics

logger = logging.getLogger(__name__)

# Metrics that the error message contains if a result file cannot be written.
_HEADLINES = ("bbox/AP", "bbox/AP50", "segm/AP", "segm/AP50")


class CocoEvaluator:
    """COCO evaluator. It collects detections of one rank and computes metrics over all ranks."""

    def __init__(
        self,
        dataset: CocoDataset,
        categories: Sequence[Category],
        worker: Worker,
        evaluator: EvaluatorName = "faster-coco-eval",
    ) -> None:
        """Create an evaluator that has no detections yet.

        Args:
            dataset: Data set with the ground truth.
            categories: Classes of the model by label; label 1 is the first. Classes that the data
                set lacks are not evaluated.
            worker: Rank of this process.
            evaluator: Library that computes the metrics.
        """
        self._dataset = dataset
        self._categories = categories
        self._worker = worker
        self._evaluator = evaluator
        self._detections: list[tuple[int, ImageDetections]] = []
        # Number of this rank's images whose detections may be incomplete because of
        # `roi.nms_candidates`.
        self.limited_images = 0

    def add(self, image_id: int, detections: ImageDetections) -> None:
        """Add the detections of one image. Images that are never added are not evaluated."""
        self._detections.append((image_id, detections))

    def mask_results(self) -> list[dict[str, Any]]:
        """Return this rank's detections with masks in COCO's results format."""
        return coco_results_from(self._detections, self._categories)["segm"]

    def evaluate(
        self,
        folder: Path | None = None,
        *,
        measure: bool = True,
        report: Path | None = None,
    ) -> dict[str, float]:
        """Compute metrics over the images of all ranks. Every rank must call this method.

        Args:
            folder: Folder for files with detections and metrics. None: do not write these files.
            measure: Compute metrics. False: write the detections and the report without metrics.
            report: HTML file for a report. None: write no report.

        Returns:
            Box and mask metrics by name, the same on all ranks. The dictionary is empty if
            `measure` is False.

        Raises:
            ConfigError: A file cannot be written, for example because the disk is full. The other
                files are written nevertheless. The error message contains the main metrics.
        """
        gathered = self._worker.gather(self._detections)
        limited_images = sum(self._worker.gather(self.limited_images))
        metrics: dict[str, float] = {}
        if self._worker.is_main:
            # Sort by image id, so that the files do not depend on the number of ranks.
            detections = sorted(
                (pair for part in gathered for pair in part), key=lambda pair: pair[0]
            )
            image_ids = {image_id for image_id, _ in detections}
            self._warn(len(image_ids), limited_images)
            results = coco_results_from(detections, self._categories)
            errors = []
            if folder is not None:
                errors += _errors_of(write_detections, folder, detections, results, self._dataset)
            if measure:
                truth = self._dataset.ground_truth(image_ids)
                metrics = coco_metrics(truth, results, self._dataset.categories, self._evaluator)
                if folder is not None:
                    errors += _errors_of(write_metrics, folder, metrics)
            if report is not None:
                from .report import write_report  # slow import, because of matplotlib

                content = self._dataset, results["segm"], metrics, image_ids
                errors += _errors_of(write_report, report, *content)
            if errors:
                raise ConfigError(_message_of(errors[0], folder or report, metrics))
        shared: dict[str, float] = self._worker.from_main(metrics)
        return shared

    def _warn(self, images: int, limited_images: int) -> None:
        """Warn of images with incomplete detections, and of images that could not be read.

        Args:
            images: Number of evaluated images.
            limited_images: Number of images whose detections may be incomplete because of
                `roi.nms_candidates`.
        """
        if limited_images:
            logger.warning(
                "detections in %s may be incomplete: more than roi.nms_candidates pairs of box and "
                "class exceeded roi.score_threshold, and the pairs with the lowest scores were "
                "dropped before NMS; raise model.roi.nms_candidates (at most 16384)",
                counted(limited_images, "image"),
            )
        if images < len(self._dataset):
            logger.warning(
                "evaluated only %d of the %d images of %s, because the others could not be read",
                images,
                len(self._dataset),
                self._dataset.name,
            )


@torch.inference_mode()
def evaluate_model(
    model: MaskRCNN,
    batches: Iterable[Batch | EncodedBatch],
    evaluator: CocoEvaluator,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> None:
    """Run a model on batches and add its detections to an evaluator.

    Args:
        model: Model to evaluate. Its training or evaluation mode is restored afterwards.
        batches: Batches of this rank.
        evaluator: Evaluator that collects the detections.
        device: Device of the model.
        autocast: Data type for autocast. None: no autocast.
    """
    threads, paste = len(os.sched_getaffinity(0)), model.config.mask_paste
    pending: deque[Future[list[tuple[int, ImageDetections]]]] = deque()
    # Threads paste the masks of a batch while the model computes the next batches. The number of
    # pending batches is limited. Otherwise, the outputs of a fast model would fill the memory.
    with _evaluating(model), LimitedImages(model) as limited, ThreadPoolExecutor(threads) as pool:
        for batch in prefetch_batches(device, batches):
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                detections = model(batch.images, batch.image_sizes)
            limited.add(detections.num_detections)
            pending.append(pool.submit(image_detections_from, detections, batch, paste))
            while len(pending) > 2 * threads:
                _add(evaluator, pending.popleft())
        while pending:
            _add(evaluator, pending.popleft())
    evaluator.limited_images += limited.count()


@torch.inference_mode()
def validation_losses(
    model: MaskRCNN,
    batches: Iterable[Batch | EncodedBatch],
    worker: Worker,
    autocast: torch.dtype | None,
) -> dict[str, float]:
    """Return the mean losses of a model in evaluation mode over the batches of all ranks.

    Args:
        model: Model to evaluate. Its training or evaluation mode is restored afterwards.
        batches: Batches of this rank, with ground truth.
        worker: Rank of this process. Every rank must call this function.
        autocast: Data type for autocast. None: no autocast.

    Returns:
        The five losses as `val/NAME` for each NAME in `LOSS_NAMES`, and their sum as `val/loss`.
    """
    device = worker.device
    totals = torch.zeros(2, len(LOSS_NAMES), device=device)
    with _evaluating(model):
        for batch in prefetch_batches(device, batches):
            assert batch.targets is not None
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                # Call the method of the class, because `compile=true` replaces `losses` of the
                # instance with a compiled function.
                terms = MaskRCNN.losses(
                    model, batch.images, batch.image_sizes, batch.targets, batch.seeds
                )
            totals += torch.stack(terms)
    means = LossTerms(*worker.sum_over_ranks(totals)).means().tolist()
    named = {f"val/{name}": value for name, value in zip(LOSS_NAMES, means, strict=True)}
    return {"val/loss": sum(means), **named}


@contextmanager
def _evaluating(model: MaskRCNN) -> Iterator[None]:
    """Set a model to evaluation mode, and restore the mode of each module afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _errors_of(write: Callable[..., None], *arguments: object) -> list[OSError]:
    """Call a function that writes files. Return a list with its `OSError`, or an empty list."""
    try:
        write(*arguments)
    except OSError as error:
        return [error]
    return []


def _message_of(error: OSError, path: Path | None, metrics: dict[str, float]) -> str:
    """Return the message for a file that cannot be written, with the most important metrics."""
    values = ", ".join(f"{name} {metrics[name]:.4f}" for name in _HEADLINES if name in metrics)
    return (
        f"a result file cannot be written to {path}: {error.strerror or error}; make space, or "
        f"choose another folder{values and f' (the metrics are {values})'}"
    )


def _add(evaluator: CocoEvaluator, pasted: Future[list[tuple[int, ImageDetections]]]) -> None:
    for image_id, detections in pasted.result():
        evaluator.add(image_id, detections)

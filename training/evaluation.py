"""COCO evaluation of a model, over all ranks."""

import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from ..model.manifest import Category
from ..model.mask_rcnn import MaskRCNN
from .coco_metrics import IOU_TYPES, coco_metrics
from .config import EvaluatorName
from .data.batches import Batch, EncodedBatch
from .data.coco import CocoDataset
from .data.device_batches import batches_on
from .detections import ImageDetections, coco_results_from, image_detections_from
from .distributed import Worker
from .evaluation_files import write_detections, write_metrics

logger = logging.getLogger(__name__)


class CocoEvaluator:
    """Collects detections and measures them against a data set's ground truth."""

    def __init__(
        self,
        dataset: CocoDataset,
        categories: Sequence[Category],
        worker: Worker,
        evaluator: EvaluatorName = "pycocotools",
    ) -> None:
        """Collect nothing yet.

        Args:
            dataset: the ground truth.
            categories: classes of the model, label 1 the first; those that the data set lacks do
                not count.
            worker: this process.
            evaluator: what computes the metrics.
        """
        self._dataset = dataset
        self._categories = categories
        self._worker = worker
        self._evaluator = evaluator
        self._detections: list[tuple[int, ImageDetections]] = []

    def add(self, image_id: int, detections: ImageDetections) -> None:
        """Take the detections of an image; an image counts only if it was added, even empty."""
        self._detections.append((image_id, detections))

    def evaluate(self, folder: Path | None = None, *, measure: bool = True) -> dict[str, float]:
        """Metrics over the images of all ranks; every rank must call it and gets the same.

        Args:
            folder: where `evaluation_files` are written; nowhere, if none is given.
            measure: whether metrics are computed; if not, there are none.

        Returns:
            What `coco_metrics` returns for boxes and for masks.
        """
        gathered = self._worker.gather(self._detections)
        metrics: dict[str, float] = {}
        if self._worker.is_main:
            # In the order of one process, so that the files do not depend on their number.
            detections = sorted(
                (pair for part in gathered for pair in part), key=lambda pair: pair[0]
            )
            metrics = self._evaluate(detections, folder, measure=measure)
        shared: dict[str, float] = self._worker.from_main(metrics)
        return shared

    def _evaluate(
        self, detections: list[tuple[int, ImageDetections]], folder: Path | None, *, measure: bool
    ) -> dict[str, float]:
        results = coco_results_from(detections, self._categories)
        if folder is not None:
            write_detections(folder, detections, results)
        if not measure:
            return {}
        image_ids = {image_id for image_id, _ in detections}
        if len(image_ids) < len(self._dataset):
            logger.warning(
                "measured on %d of the %d images of %s; the others could not be read and count "
                "neither way",
                len(image_ids),
                len(self._dataset),
                self._dataset.name,
            )
        ground_truth = self._dataset.ground_truth(image_ids)
        categories = self._dataset.categories
        metrics: dict[str, float] = {}
        for iou_type in IOU_TYPES:
            metrics |= coco_metrics(
                ground_truth, results[iou_type], iou_type, categories, self._evaluator
            )
        if folder is not None:
            write_metrics(folder, metrics)
        return metrics


@torch.inference_mode()
def evaluate_model(
    model: MaskRCNN,
    batches: Iterable[Batch | EncodedBatch],
    evaluator: CocoEvaluator,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> None:
    """Give an evaluator what a model finds.

    Args:
        model: every module of it is left in the mode it was in.
        batches: this rank's share of the data set.
        evaluator: takes the detections.
        device: where the model computes.
        autocast: numeric type of the model's matrix products; none, its own.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    workers, paste = os.cpu_count() or 1, model.config.mask_paste
    pending: deque[Future[list[tuple[int, ImageDetections]]]] = deque()
    # Masks are pasted by threads while the model is at the next batches; a bounded number of
    # them, or a fast model would pile its outputs up.
    with ThreadPoolExecutor(workers) as pool:
        for batch in batches_on(device, batches):
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                detections = model(batch.images, batch.image_sizes)
            pending.append(pool.submit(image_detections_from, detections, batch, paste))
            while len(pending) > 2 * workers:
                _add(evaluator, pending.popleft())
        while pending:
            _add(evaluator, pending.popleft())
    for module, mode in modes.items():
        module.training = mode


def _add(evaluator: CocoEvaluator, pasted: Future[list[tuple[int, ImageDetections]]]) -> None:
    for image_id, detections in pasted.result():
        evaluator.add(image_id, detections)

"""COCO evaluation: average precision of boxes and masks."""

import contextlib
import io
import json
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from ..model.mask_rcnn import Detections
from ..model.masks import Rle, rles_from_probabilities
from .data.batches import Batch
from .data.coco import CocoDataset

IouType = Literal["bbox", "segm"]


class ImageDetections(NamedTuple):
    """What was found in one image, in source pixels."""

    boxes: NDArray[np.float32]
    """[D, 4] xyxy."""
    scores: NDArray[np.float32]
    """[D]."""
    labels: NDArray[np.int64]
    """[D]; 1 is the first class."""
    masks: list[Rle]
    """D masks of the whole image."""


class CocoEvaluator:
    """Collects detections and measures them against a data set's ground truth."""

    def __init__(self, dataset: CocoDataset) -> None:
        self._dataset = dataset
        self._image_ids: list[int] = []
        self._results: dict[IouType, list[dict[str, Any]]] = {"bbox": [], "segm": []}

    def add(self, image_id: int, detections: ImageDetections) -> None:
        """Take the detections of an image; an image counts only if it was added, even empty."""
        self._image_ids.append(image_id)
        for box, score, label, mask in zip(*detections, strict=True):
            left, top, right, bottom = box.tolist()
            result = {
                "image_id": image_id,
                "category_id": self._dataset.categories[label - 1].id,
                "score": float(score),
            }
            bbox = [left, top, right - left, bottom - top]
            self._results["bbox"].append({**result, "bbox": bbox})
            size = [mask.height, mask.width]
            segmentation = {"size": size, "counts": mask.counts.decode("ascii")}
            self._results["segm"].append({**result, "segmentation": segmentation})

    def evaluate(self, folder: Path | None = None) -> dict[str, float]:
        """Average precision over all ranks; every rank must call it and gets the same.

        Args:
            folder: where `bbox.json` and `segm.json`, the detections in COCO's results format,
                are written; nowhere, if none is given.

        Returns:
            `bbox/AP`, `bbox/AP50`, `bbox/AP75`, `bbox/APs`, `bbox/APm`, `bbox/APl`, for every
            class `bbox/AP/<name>`, and the same for `segm`: from 0 to 1, or -1 where there is no
            ground truth to be found.
        """
        self._gather()
        metrics: list[dict[str, float]] = [{}]
        if not dist.is_initialized() or dist.get_rank() == 0:
            ground_truth = _coco_from(self._dataset.ground_truth(self._image_ids))
            for iou_type, results in self._results.items():
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{iou_type}.json").write_text(json.dumps(results))
                precision = _precision(ground_truth, results, iou_type)
                metrics[0] |= self._metrics_from(precision, iou_type)
        if dist.is_initialized():
            dist.broadcast_object_list(metrics)
        return metrics[0]

    def _gather(self) -> None:
        """Bring the detections of all ranks to the first one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        own = (self._image_ids, self._results)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, gathered if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            for image_ids, results in gathered[1:]:
                self._image_ids += image_ids
                for iou_type, entries in results.items():
                    self._results[iou_type] += entries

    def _metrics_from(self, precision: NDArray[np.float64], iou_type: IouType) -> dict[str, float]:
        """Metrics of the precision `[T, R, K, A]` by IoU, recall, class and area."""
        parts = {
            "AP": precision[..., 0],
            "AP50": precision[0, ..., 0],
            "AP75": precision[5, ..., 0],
            "APs": precision[..., 1],
            "APm": precision[..., 2],
            "APl": precision[..., 3],
        }
        for number, category in enumerate(self._dataset.categories):
            parts[f"AP/{category.name}"] = precision[:, :, number, 0]
        return {f"{iou_type}/{name}": _mean(part) for name, part in parts.items()}


@torch.inference_mode()
def evaluate_model(
    model: nn.Module,
    batches: Iterable[Batch],
    dataset: CocoDataset,
    *,
    device: torch.device,
    autocast: torch.dtype | None = None,
    folder: Path | None = None,
) -> dict[str, float]:
    """Metrics of a model, as `CocoEvaluator.evaluate` returns them.

    Args:
        model: gives `Detections` of images and image sizes; left in the mode it was in.
        batches: this rank's share of the data set.
        dataset: its ground truth.
        device: where the model computes.
        autocast: numeric type of the model's matrix products; none, its own.
        folder: where the detections are written.
    """
    evaluator = CocoEvaluator(dataset)
    was_training = model.training
    model.eval()
    workers = os.cpu_count() or 1
    pending: deque[Future[list[tuple[int, ImageDetections]]]] = deque()
    # Masks are pasted by threads while the model is at the next batches; a bounded number of
    # them, or a fast model would pile its outputs up.
    with ThreadPoolExecutor(workers) as pool:
        for batch in batches:
            moved = batch.to(device, non_blocking=True)
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                detections: Detections = model(moved.images, moved.image_sizes)
            pending.append(pool.submit(_image_detections_from, detections, batch))
            while len(pending) > 2 * workers:
                _add(evaluator, pending.popleft())
        while pending:
            _add(evaluator, pending.popleft())
    model.train(was_training)
    return evaluator.evaluate(folder)


def _add(evaluator: CocoEvaluator, pasted: Future[list[tuple[int, ImageDetections]]]) -> None:
    for image_id, detections in pasted.result():
        evaluator.add(image_id, detections)


def _image_detections_from(
    detections: Detections, batch: Batch
) -> list[tuple[int, ImageDetections]]:
    """Detections by image id, brought from input to source pixels."""
    counts = detections.num_detections.tolist()
    labels_BD = detections.labels.cpu().numpy()
    boxes_BD4, scores_BD, masks_BDMM = (
        tensor.float().cpu().numpy()
        for tensor in (detections.boxes, detections.scores, detections.masks)
    )
    scale_B2 = _float32(batch.source_sizes) / _float32(batch.image_sizes)
    results = []
    for number, image_id in enumerate(batch.image_ids.tolist()):
        count = counts[number]
        height, width = batch.source_sizes[number].tolist()
        boxes = boxes_BD4[number, :count] * scale_B2[number, [1, 0, 1, 0]]
        masks = rles_from_probabilities(masks_BDMM[number, :count], boxes, height, width)
        found = ImageDetections(boxes, scores_BD[number, :count], labels_BD[number, :count], masks)
        results.append((image_id, found))
    return results


def _float32(sizes: Tensor) -> NDArray[np.float32]:
    return sizes.numpy().astype(np.float32)


def _coco_from(content: dict[str, Any]) -> COCO:
    coco = COCO()
    coco.dataset = content
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def _precision(
    ground_truth: COCO, results: list[dict[str, Any]], iou_type: IouType
) -> NDArray[np.float64]:
    """Precision `[T, R, K, A]` at most 100 detections an image; -1 without ground truth."""
    if not ground_truth.imgs:
        return np.full((10, 1, len(ground_truth.cats), 4), -1.0)
    with contextlib.redirect_stdout(io.StringIO()):
        if results:
            found = ground_truth.loadRes([dict(result) for result in results])
        else:
            found = _coco_from({**ground_truth.dataset, "annotations": []})
        evaluation = COCOeval(ground_truth, found, iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
    precision: NDArray[np.float64] = evaluation.eval["precision"][..., -1]
    return precision


def _mean(precision: NDArray[np.float64]) -> float:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else -1.0

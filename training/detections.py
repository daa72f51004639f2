"""Detections of an image, from the model's padded outputs to COCO's results format."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..model.manifest import Category
from ..model.mask_rcnn import Detections
from ..model.masks import MaskPaste, Rle, rles_from_probabilities
from .coco_metrics import IouType
from .data.batches import Batch


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


def image_detections_from(
    detections: Detections, batch: Batch, paste: MaskPaste
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
        masks = rles_from_probabilities(
            masks_BDMM[number, :count], boxes, height, width, paste=paste
        )
        found = ImageDetections(boxes, scores_BD[number, :count], labels_BD[number, :count], masks)
        results.append((image_id, found))
    return results


def _float32(sizes: Tensor) -> NDArray[np.float32]:
    return sizes.cpu().numpy().astype(np.float32)


def coco_results_from(
    detections: Sequence[tuple[int, ImageDetections]], categories: Sequence[Category]
) -> dict[IouType, list[dict[str, Any]]]:
    """Detections in COCO's results format: one list with boxes, one with masks."""
    results: dict[IouType, list[dict[str, Any]]] = {"bbox": [], "segm": []}
    for image_id, found in detections:
        for box, score, label, mask in zip(*found, strict=True):
            left, top, right, bottom = box.tolist()
            result = {
                "image_id": image_id,
                "category_id": categories[label - 1].id,
                "score": float(score),
            }
            bbox = [left, top, right - left, bottom - top]
            results["bbox"].append({**result, "bbox": bbox})
            results["segm"].append({**result, "segmentation": coco_from_rle(mask)})
    return results


def coco_from_rle(mask: Rle) -> dict[str, Any]:
    """A mask as COCO's JSON has it."""
    return {"size": [mask.height, mask.width], "counts": mask.counts.decode("ascii")}

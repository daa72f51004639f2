"""Write an evaluation's detections and metrics to files named as in maskrcnn-benchmark."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...model.atomic_files import atomic_write
from ...model.bundle.manifest import Category
from ...model.checkpoint import save_atomically
from ...model.masks import coco_from_rle
from .coco_curves import IOU_TYPES, IouType
from .detections import ImageDetections

# Folder in `output_dir` for files with detections and metrics.
RESULTS_FOLDER = "inference"


def coco_results_from(
    detections: Sequence[tuple[int, ImageDetections]], categories: Sequence[Category]
) -> dict[IouType, list[dict[str, Any]]]:
    """Convert pairs of image id and detections to COCO's results format.

    `categories` are the classes by label; label 1 is the first.

    Returns:
        Dictionary of two lists with one entry per detection: `bbox` has boxes, `segm` has masks.
    """
    results: dict[IouType, list[dict[str, Any]]] = {"bbox": [], "segm": []}
    for image_id, image in detections:
        for box, score, label, mask in zip(*image, strict=True):
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


def write_detections(
    folder: Path,
    detections: Sequence[tuple[int, ImageDetections]],
    results: dict[IouType, list[dict[str, Any]]],
) -> None:
    """Write detections to `bbox.json`, `segm.json` and `predictions.pth` in a folder.

    Each file is replaced atomically. Metrics of an earlier evaluation (`coco_results.pth`) are
    removed. The JSON files contain `results`: the same detections in COCO's results format, from
    `coco_results_from`. `predictions.pth` is a list with one dictionary per image:

        image_id: Id of the image.
        boxes: [D, 4] float32 xyxy in pixels of the original image.
        scores: [D] float32.
        labels: [D] int64; 1 is the first class.
        masks: D COCO RLE dictionaries (`size`, `counts`).

    `torch.load` can read `predictions.pth` with `weights_only=True`.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coco_results.pth").unlink(missing_ok=True)
    for iou_type in IOU_TYPES:
        with atomic_write(folder / f"{iou_type}.json") as file:
            file.write(json.dumps(results[iou_type]).encode())
    predictions = [
        {
            "image_id": image_id,
            "boxes": torch.from_numpy(image.boxes),
            "scores": torch.from_numpy(image.scores),
            "labels": torch.from_numpy(image.labels),
            "masks": [coco_from_rle(mask) for mask in image.masks],
        }
        for image_id, image in detections
    ]
    save_atomically(predictions, folder / "predictions.pth")


def write_metrics(folder: Path, metrics: dict[str, float]) -> None:
    """Write metrics to `coco_results.pth` in a folder.

    The file contains a dictionary with the keys `bbox` and `segm`. Each value is a dictionary of
    metrics by name, such as `AP50`.

    Raises:
        OSError: The file cannot be written.
    """
    by_type = {
        iou_type: {
            name.removeprefix(f"{iou_type}/"): value
            for name, value in metrics.items()
            if name.startswith(f"{iou_type}/")
        }
        for iou_type in IOU_TYPES
    }
    save_atomically(by_type, folder / "coco_results.pth")

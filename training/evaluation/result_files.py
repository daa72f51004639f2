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
from ..config import ConfigError
from .coco_curves import IOU_TYPES, IouType
from .detections import ImageDetections

# Folder in `output_dir` for files with detections and metrics.
RESULTS_FOLDER = "inference"

# Metrics in the message of an error.
_HEADLINES = ("bbox/AP", "bbox/AP50", "segm/AP", "segm/AP50")


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


def write_results(
    folder: Path,
    detections: Sequence[tuple[int, ImageDetections]],
    results: dict[IouType, list[dict[str, Any]]],
    metrics: dict[str, float],
) -> None:
    """Write detections and metrics to files in a folder. Each file is replaced atomically.

    `bbox.json` and `segm.json` contain `results`: the detections in COCO's results format, from
    `coco_results_from`. `predictions.pth` is a list with one dictionary per image:

        image_id: Id of the image.
        boxes: [D, 4] float32 xyxy in pixels of the original image.
        scores: [D] float32.
        labels: [D] int64; 1 is the first class.
        masks: D COCO RLE dictionaries (`size`, `counts`).

    `coco_results.pth` is a dictionary with the keys `bbox` and `segm`. Each value is a dictionary
    of metrics by name, such as `AP50`. If there are no metrics, an older file of this name is
    removed. `torch.load` can read both files with `weights_only=True`.

    Raises:
        ConfigError: A file cannot be written. The message has the most important metrics.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "coco_results.pth").unlink(missing_ok=True)
        for iou_type in IOU_TYPES:
            with atomic_write(folder / f"{iou_type}.json") as file:
                file.write(json.dumps(results[iou_type]).encode())
        predictions = [_prediction(*pair) for pair in detections]
        save_atomically(predictions, folder / "predictions.pth")
        if metrics:
            save_atomically(_by_type(metrics), folder / "coco_results.pth")
    except OSError as error:
        values = ", ".join(f"{name} {metrics[name]:.4f}" for name in _HEADLINES if name in metrics)
        raise ConfigError(
            f"the result files cannot be written to {folder}: {error.strerror or error}; make "
            f"space, or choose another folder{values and f' (the metrics are {values})'}"
        ) from error


def _prediction(image_id: int, image: ImageDetections) -> dict[str, Any]:
    return {
        "image_id": image_id,
        "boxes": torch.from_numpy(image.boxes),
        "scores": torch.from_numpy(image.scores),
        "labels": torch.from_numpy(image.labels),
        "masks": [coco_from_rle(mask) for mask in image.masks],
    }


def _by_type(metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    return {
        iou_type: {
            name.removeprefix(f"{iou_type}/"): value
            for name, value in metrics.items()
            if name.startswith(f"{iou_type}/")
        }
        for iou_type in IOU_TYPES
    }

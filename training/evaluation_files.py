"""The four files of an evaluation, under the names of the reference implementations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .coco_metrics import IOU_TYPES, IouType
from .detections import ImageDetections, coco_from_rle

FOLDER = "inference"
"""Where they lie within the folder of a run."""


def write_detections(
    folder: Path,
    detections: Sequence[tuple[int, ImageDetections]],
    results: dict[IouType, list[dict[str, Any]]],
) -> None:
    """Write what was found, and remove the metrics of an earlier evaluation.

    `bbox.json` and `segm.json` hold detections in COCO's results format, for COCO's own tools.
    `predictions.pth` holds a list with, for every image that was looked at, its `image_id`, `boxes`
    [D, 4] float32 (xyxy in pixels of the image), `scores` [D] float32, `labels` [D] int64 (1 is the
    first class) and `masks`, D run-length encodings (`size`, `counts`). `torch.load` reads it with
    `weights_only=True`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coco_results.pth").unlink(missing_ok=True)
    for iou_type in IOU_TYPES:
        (folder / f"{iou_type}.json").write_text(json.dumps(results[iou_type]))
    predictions = [
        {
            "image_id": image_id,
            "boxes": torch.from_numpy(found.boxes),
            "scores": torch.from_numpy(found.scores),
            "labels": torch.from_numpy(found.labels),
            "masks": [coco_from_rle(mask) for mask in found.masks],
        }
        for image_id, found in detections
    ]
    torch.save(predictions, folder / "predictions.pth")


def write_metrics(folder: Path, metrics: dict[str, float]) -> None:
    """Write `coco_results.pth`: metrics by name (`AP`, `AR100`, `AP/<class>`) by `bbox`, `segm`."""
    by_type = {
        iou_type: {
            name.removeprefix(f"{iou_type}/"): value
            for name, value in metrics.items()
            if name.startswith(f"{iou_type}/")
        }
        for iou_type in IOU_TYPES
    }
    torch.save(by_type, folder / "coco_results.pth")

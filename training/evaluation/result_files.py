"""Write an evaluation's detections and metrics to files named as in maskrcnn-benchmark."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...model.atomic_files import atomic_write
from ...model.bundle.manifest import Category
from ...model.checkpoint import save_atomically
from ...model.masks import coco_from_rle
from ..data.coco.dataset import CocoDataset
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
    dataset: CocoDataset,
) -> None:
    """Write detections to `bbox.json`, `segm.json` and `predictions.pth` in a folder.

    Each file is replaced atomically. Metrics of an earlier evaluation (`coco_results.pth`) are
    removed. The JSON files contain `results`: the same detections in COCO's results format, from
    `coco_results_from`. The ids of images and categories are those in the annotation file of
    `dataset`, also if they are strings. `predictions.pth` is a list with one dictionary per image:

        image_id: Id of the image in the annotation file.
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
            listed = _with_ids(results[iou_type], dataset.string_ids)
            file.write(json.dumps(listed).encode())
    image_ids = dataset.string_ids["image_id"]
    predictions = [
        {
            "image_id": image_ids.get(image_id, image_id),
            "boxes": torch.from_numpy(image.boxes),
            "scores": torch.from_numpy(image.scores),
            "labels": torch.from_numpy(image.labels),
            "masks": [coco_from_rle(mask) for mask in image.masks],
        }
        for image_id, image in detections
    ]
    save_atomically(predictions, folder / "predictions.pth")


def read_mask_results(folder: Path, dataset: CocoDataset) -> list[dict[str, Any]]:
    """Read the `segm.json` that `write_detections` wrote. Convert its ids to those of `dataset`."""
    integers = {
        key: {text: id_ for id_, text in ids.items()} for key, ids in dataset.string_ids.items()
    }
    return _with_ids(json.loads((folder / "segm.json").read_text()), integers)


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


def _with_ids(
    results: list[dict[str, Any]], ids: Mapping[str, Mapping[Any, Any]]
) -> list[dict[str, Any]]:
    """Replace ids in COCO results. `ids` maps old to new ids for each key, such as `image_id`."""
    used = {key: new for key, new in ids.items() if new}
    if not used:  # the common case
        return results
    return [
        {**result, **{key: new.get(result[key], result[key]) for key, new in used.items()}}
        for result in results
    ]

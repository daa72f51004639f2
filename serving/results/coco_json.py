"""Conversion of detections to COCO results (JSON) and to NumPy arrays (NPZ)."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.masks import coco_from_rle, mask_from_rle
from ..detections import Detections


def image_ids(paths: Sequence[Path]) -> list[int | str]:
    """Return the COCO image ID of each file: the name without suffix, as an int if it is decimal.

    Files that would have equal IDs, such as `cat.jpg` and `cat.png`, have their full file names as
    IDs.
    """
    ids = [int(path.stem) if path.stem.isdecimal() else path.stem for path in paths]
    counts = Counter(ids)
    return [own if counts[own] == 1 else path.name for path, own in zip(paths, ids, strict=True)]


def coco_results(image_id: int | str, detections: Detections) -> list[dict[str, Any]]:
    """Return detections in COCO's results format, which `pycocotools.coco.COCO.loadRes` reads.

    Each detection is a record with `image_id`, `category_id`, `score`, `bbox` (x, y, width, height
    in pixels of the image after its EXIF rotation) and, if there are RLE masks, `segmentation`.
    """
    x_min, y_min, x_max, y_max = detections.boxes.astype(float).T
    bboxes = zip(x_min, y_min, x_max - x_min, y_max - y_min, strict=True)
    records: list[dict[str, Any]] = [
        {
            "image_id": image_id,
            "category_id": int(category_id),
            "bbox": [float(value) for value in bbox],
            "score": float(score),
        }
        for category_id, score, bbox in zip(
            detections.category_ids, detections.scores, bboxes, strict=True
        )
    ]
    for record, rle in zip(records, detections.rles or (), strict=False):
        record["segmentation"] = coco_from_rle(rle)
    return records


def arrays_from_detections(detections: Detections) -> dict[str, NDArray[Any]]:
    """Return N detections as arrays by name, for `numpy.savez`. No array needs pickle.

    `boxes` [N, 4] float32 xyxy in pixels of the image after its EXIF rotation, `scores` [N]
    float32, `labels` and `category_ids` [N] int64, `class_names` [N] str, `size` [2] int64 (height,
    width) and, if the detections have RLE masks, `masks` [N, height, width] bool.
    """
    size = (detections.height, detections.width)
    arrays: dict[str, NDArray[Any]] = {
        "boxes": detections.boxes,
        "scores": detections.scores,
        "labels": detections.labels,
        "category_ids": detections.category_ids,
        "class_names": np.array(detections.class_names, np.str_),
        "size": np.array(size, np.int64),
    }
    if detections.rles is not None:
        masks = [mask_from_rle(rle) for rle in detections.rles]
        arrays["masks"] = np.array(masks, np.bool_).reshape(-1, *size)
    return arrays

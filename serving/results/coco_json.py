"""Detections as a COCO results list, the form that pycocotools' `loadRes` reads."""

from pathlib import Path
from typing import Any

from ..detections import Detections


def image_id_from_path(path: Path) -> int | str:
    """The id of an image in COCO's results: its file's stem, as a number where it is one."""
    return int(path.stem) if path.stem.isdecimal() else path.stem


def coco_results(image_id: int | str, detections: Detections) -> list[dict[str, Any]]:
    """One record a detection: `bbox` is x, y, width, height in pixels of the source image.

    `segmentation` is there if the masks are run-length encoded.
    """
    x_min, y_min, x_max, y_max = detections.boxes.astype(float).T
    sides = zip(x_min, y_min, x_max - x_min, y_max - y_min, strict=True)
    records: list[dict[str, Any]] = [
        {
            "image_id": image_id,
            "category_id": int(category_id),
            "bbox": [float(side) for side in bbox],
            "score": float(score),
        }
        for category_id, score, bbox in zip(
            detections.category_ids, detections.scores, sides, strict=True
        )
    ]
    for record, rle in zip(records, detections.rles or (), strict=False):
        size = [rle.height, rle.width]
        record["segmentation"] = {"size": size, "counts": rle.counts.decode("ascii")}
    return records

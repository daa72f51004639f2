"""Conversion of detections to JSON, for the HTTP API."""

from typing import Any

from pydantic_core import to_json

from ...model.masks import coco_from_rle
from ..detections import Detections


def json_from_detections(detections: Detections) -> bytes:
    """Return detections as a JSON object with `height`, `width` and `detections`.

    Each detection has `class_name`, `label`, `category_id`, `score`, `box` (x_min, y_min, x_max,
    y_max in pixels of the image after its EXIF rotation) and, depending on the mask format,
    `segmentation`: COCO RLE as an object with `size` and `counts`, or a list of polygons, each a
    list x, y, x, y, ...
    """
    rows = zip(
        detections.class_names,
        detections.labels.tolist(),
        detections.category_ids.tolist(),
        detections.scores.tolist(),
        detections.boxes.tolist(),
        strict=True,
    )
    names = ("class_name", "label", "category_id", "score", "box")
    records: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in rows]
    if detections.rles is not None:
        for record, rle in zip(records, detections.rles, strict=True):
            record["segmentation"] = coco_from_rle(rle)
    elif detections.polygons is not None:
        for record, outlines in zip(records, detections.polygons, strict=True):
            record["segmentation"] = [outline.ravel().tolist() for outline in outlines]
    return to_json({"height": detections.height, "width": detections.width, "detections": records})

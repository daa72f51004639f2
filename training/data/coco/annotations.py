"""Validate and convert the annotations in a COCO file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from ....model.masks import Rle, coco_from_rle, mask_from_rle
from .mask_targets import Region, Segmentation, mask_from_segmentation


class InvalidAnnotationError(ValueError):
    """Invalid annotation. The message has no details, so that equal reasons can be counted."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Annotated object, or annotated crowd (a region of many objects)."""

    annotation_id: int
    # 1 is the first class.
    label: int
    # x, y, width, height in pixels, as annotated: it may extend beyond the image.
    bbox: tuple[float, float, float, float]
    # In square pixels.
    area: float
    # Crowds are ignored in training; in evaluation, detections inside them are not counted.
    is_crowd: bool
    # Polygons (several if the object is visible in several pieces) or an RLE.
    segmentation: Segmentation

    def clipped_box(self, height: int, width: int) -> Region:
        """Return the box as xyxy, clipped to the image's height and width."""
        return _clip(self.bbox, height, width)


def instance_from_annotation(
    annotation: Mapping[str, Any], height: int, width: int, label_by_category: Mapping[int, int]
) -> Instance:
    """Validate one entry of a COCO file's list `annotations` and convert it.

    Args:
        annotation: The entry.
        height: Height of its image in pixels.
        width: Width of its image in pixels.
        label_by_category: Label (1 is the first class) by category id.

    Raises:
        InvalidAnnotationError: The category, box or segmentation is invalid.
    """
    category = annotation.get("category_id")
    if not isinstance(category, int) or category not in label_by_category:
        raise InvalidAnnotationError("unknown category")
    bbox = _bbox_from(annotation.get("bbox"))
    left, top, right, bottom = _clip(bbox, height, width)
    if right <= left or bottom <= top:
        raise InvalidAnnotationError("box without area inside the image")
    segmentation = _segmentation_from(annotation.get("segmentation"), height, width)
    area = annotation.get("area")
    if not isinstance(area, int | float):
        area = mask_from_segmentation(segmentation, (height, width), (height, width)).sum()
    return Instance(
        annotation_id=annotation.get("id", -1),
        label=label_by_category[category],
        bbox=bbox,
        area=float(area),
        is_crowd=bool(annotation.get("iscrowd", 0)),
        segmentation=segmentation,
    )


def coco_from_segmentation(segmentation: Segmentation) -> list[list[float]] | dict[str, Any]:
    """Convert a segmentation to the value of the key `segmentation` in a COCO file."""
    if isinstance(segmentation, Rle):
        return coco_from_rle(segmentation)
    return [ring.tolist() for ring in segmentation]


def _bbox_from(value: Any) -> tuple[float, float, float, float]:
    if not isinstance(value, list) or len(value) != 4:
        raise InvalidAnnotationError("box is not four numbers")
    if not all(isinstance(side, int | float) and math.isfinite(side) for side in value):
        raise InvalidAnnotationError("box is not four numbers")
    return (value[0], value[1], value[2], value[3])


def _clip(bbox: tuple[float, float, float, float], height: int, width: int) -> Region:
    x, y, box_width, box_height = bbox
    return (
        min(max(x, 0.0), width),
        min(max(y, 0.0), height),
        min(max(x + box_width, 0.0), width),
        min(max(y + box_height, 0.0), height),
    )


def _segmentation_from(value: Any, height: int, width: int) -> Segmentation:
    if not value:
        raise InvalidAnnotationError("no segmentation")
    if isinstance(value, dict):
        return _rle_from(value, height, width)
    if not isinstance(value, list):
        raise InvalidAnnotationError("segmentation is neither polygons nor RLE")
    try:
        rings = [np.array(ring, dtype=np.float64) for ring in value]
    except (TypeError, ValueError):
        raise InvalidAnnotationError("polygon is not a list of numbers") from None
    # Rings of one or two points cover nothing, and pycocotools reads four numbers as a box.
    usable = tuple(r for r in rings if r.ndim == 1 and r.size >= 6 and r.size % 2 == 0)
    if not usable:
        raise InvalidAnnotationError("polygon of fewer than three points")
    if not all(np.isfinite(ring).all() for ring in usable):
        raise InvalidAnnotationError("polygon is not a list of numbers")
    return usable


def _rle_from(value: Mapping[str, Any], height: int, width: int) -> Rle:
    if value.get("size") != [height, width]:
        raise InvalidAnnotationError("RLE of another size than the image")
    counts: Any = value.get("counts")
    try:
        if isinstance(counts, list):
            counts = coco_mask.frPyObjects({**value, "counts": counts}, height, width)["counts"]
        elif isinstance(counts, str):
            counts = counts.encode()
        rle = Rle(height, width, counts)
        # Decode once as a check: if the runs end early, pycocotools leaves pixels uninitialized.
        mask_from_rle(rle)
    except (TypeError, ValueError, OverflowError):
        raise InvalidAnnotationError("RLE is damaged") from None
    return rle

"""Validate and convert the annotations in a COCO file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from ....model.masks import Rle, coco_from_rle, mask_from_rle
from .numbers import id_from, integer_from
from .segmentation_masks import Region, Ring, Segmentation, mask_from_segmentation

# Largest valid absolute value of a coordinate, in multiples of the image's longer side. The limit
# is needed because pycocotools' memory and time for a polygon are proportional to its extent.
MAX_EXTENT = 10
# A tuple, because `isinstance` takes three times as long with the type `int | float`.
_NUMBERS = (int, float)
FAR_OUTSIDE = "coordinates far outside the image"


class InvalidAnnotationError(ValueError):
    """An annotation is invalid.

    The message depends only on the kind of fault, so that a report can count the faults of each
    kind.
    """


@dataclass(frozen=True, slots=True)
class Instance:
    """Annotated object, or annotated crowd (a region of many objects)."""

    annotation_id: int | str
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
    annotation: Mapping[str, Any],
    height: int,
    width: int,
    label_by_category: Mapping[int, int],
) -> tuple[Instance, list[str]]:
    """Validate one entry of a COCO file's list `annotations` and convert it.

    Args:
        annotation: The entry to convert.
        height: Height of the annotated image in pixels.
        width: Width of the annotated image in pixels.
        label_by_category: Label (1 is the first class) by category id.

    Returns:
        The instance, and a description of each repair made to the entry.

    Raises:
        InvalidAnnotationError: The category, box, segmentation or `iscrowd` is invalid.
    """
    category = id_from(annotation.get("category_id"))
    if not isinstance(category, int) or category not in label_by_category:
        raise InvalidAnnotationError("unknown category")
    limit = float(MAX_EXTENT * max(height, width))
    segmentation, is_complete = _segmentation_from(annotation, height, width, limit)
    if annotation.get("bbox") is None:
        bbox = _bbox_of(segmentation)
    else:
        bbox = _bbox_from(annotation["bbox"], limit)
    left, top, right, bottom = _clip(bbox, height, width)
    if right <= left or bottom <= top:
        raise InvalidAnnotationError("box outside the image, or without area")
    repairs = [] if is_complete else ["invalid polygon beside valid ones; left out"]
    area: Any = annotation.get("area")
    if not is_possible_area(area, height, width):
        if isinstance(area, _NUMBERS):
            repairs.append("impossible area; computed from the segmentation")
        area = mask_from_segmentation(segmentation, (height, width), (height, width)).sum()
    name = annotation.get("id", -1)
    instance = Instance(
        annotation_id=name if isinstance(name, int) else str(name),
        label=label_by_category[category],
        bbox=bbox,
        area=float(area),
        is_crowd=_is_crowd(annotation.get("iscrowd")),
        segmentation=segmentation,
    )
    return instance, repairs


def is_possible_area(area: Any, height: int, width: int) -> bool:
    """Return whether a value is a plausible area in an image of `height` x `width` pixels.

    Plausible areas are numbers from 0 to `(10 * max(height, width)) ** 2`, in square pixels.
    """
    # Evaluation would ignore objects of a negative area, and those above 10^10 square pixels.
    return isinstance(area, _NUMBERS) and 0 <= area <= float(MAX_EXTENT * max(height, width)) ** 2


def coco_from_segmentation(segmentation: Segmentation) -> list[list[float]] | dict[str, Any]:
    """Convert a segmentation to the value of the key `segmentation` in a COCO file."""
    if isinstance(segmentation, Rle):
        return coco_from_rle(segmentation)
    return [ring.tolist() for ring in segmentation]


def _segmentation_from(
    annotation: Mapping[str, Any], height: int, width: int, limit: float
) -> tuple[Segmentation, bool]:
    """Return an annotation's segmentation, and whether all its polygons are valid (True for RLE).

    Invalid polygons are left out. `height` and `width` are the size of the image in pixels. `limit`
    is the largest valid absolute value of a coordinate, in pixels.

    Raises:
        InvalidAnnotationError: The annotation has no segmentation, its segmentation is neither
            polygons nor RLE, its RLE is invalid, or all its polygons are invalid.
    """
    value = annotation.get("segmentation")
    if not value:
        raise InvalidAnnotationError(
            "no segmentation, neither polygons nor RLE; have the annotation tool export instance "
            "segmentation, not only boxes"
        )
    if isinstance(value, dict):
        return _rle_from(value, height, width), True
    if isinstance(value, list):
        return _polygons_from(value, limit)
    raise InvalidAnnotationError("segmentation is neither polygons nor RLE")


def _bbox_of(segmentation: Segmentation) -> tuple[float, float, float, float]:
    """Return the box (x, y, width, height) that encloses a segmentation."""
    if isinstance(segmentation, Rle):
        x, y, width, height = coco_mask.toBbox(coco_from_rle(segmentation)).tolist()
        return x, y, width, height
    points = np.concatenate([ring.reshape(-1, 2) for ring in segmentation]).astype(float)
    (left, top), (right, bottom) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    return left, top, right - left, bottom - top


def _is_crowd(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    number = 0 if value is None else integer_from(value)
    if number not in (0, 1):
        raise InvalidAnnotationError("iscrowd is neither 0 nor 1")
    return number == 1


def _bbox_from(value: Any, limit: float) -> tuple[float, float, float, float]:
    try:
        is_box = isinstance(value, list) and len(value) == 4 and not any(map(math.isnan, value))
    except TypeError:
        return _bbox_from(_floats_from(value), limit)
    except OverflowError:
        raise InvalidAnnotationError(FAR_OUTSIDE) from None
    if not is_box:
        raise InvalidAnnotationError("box is not four numbers")
    if max(map(abs, value)) > limit:
        raise InvalidAnnotationError(FAR_OUTSIDE)
    return (value[0], value[1], value[2], value[3])


def _floats_from(values: list[Any]) -> list[float]:
    """Convert numbers, or strings such as "12.5", to floats.

    If any value cannot be converted, return an empty list.
    """
    try:
        return [*map(float, values)]
    except (TypeError, ValueError, OverflowError):
        return []


def _clip(bbox: tuple[float, float, float, float], height: int, width: int) -> Region:
    x, y, box_width, box_height = bbox
    return (
        min(max(x, 0.0), width),
        min(max(y, 0.0), height),
        min(max(x + box_width, 0.0), width),
        min(max(y + box_height, 0.0), height),
    )


def _polygons_from(value: list[Any], limit: float) -> tuple[tuple[Ring, ...], bool]:
    """Return the valid polygons of a segmentation, and whether all its polygons are valid.

    `limit` is the largest valid absolute value of a coordinate, in pixels.

    Raises:
        InvalidAnnotationError: All polygons are invalid.
    """
    rings, reasons = [], []
    for points in _point_lists(value):
        try:
            rings.append(_ring_from(points, limit))
        except InvalidAnnotationError as error:
            reasons.append(error)
    if not rings:
        raise reasons[0]
    return tuple(rings), not reasons


def _point_lists(value: list[Any]) -> list[Any]:
    """Return the polygons of a segmentation, each as a list of numbers or of pairs of numbers.

    A single polygon may be given without the enclosing list. It becomes a list of one polygon.
    """
    first = value[0]
    # Some programs write the only polygon without the list around it.
    if isinstance(first, _NUMBERS) or (len(value) > 2 and _is_pair(first)):
        return [value]
    return value


def _is_pair(value: Any) -> bool:
    numbers = isinstance(value, list) and len(value) == 2
    return numbers and all(isinstance(part, _NUMBERS) for part in value)


def _ring_from(points: Any, limit: float) -> Ring:
    try:
        ring = np.array(points, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidAnnotationError("polygon is not a list of numbers") from None
    except OverflowError:
        raise InvalidAnnotationError(FAR_OUTSIDE) from None
    if ring.ndim == 2 and ring.shape[1] == 2:
        ring = ring.ravel()
    if ring.ndim == 1 and ring.size % 2:
        raise InvalidAnnotationError("polygon with an odd number of coordinates")
    # Reject rings of one or two points: they cover nothing, and pycocotools would read the four
    # numbers of two points as a box.
    if ring.ndim != 1 or ring.size < 6:
        raise InvalidAnnotationError("polygon of fewer than three points")
    extent = np.abs(ring).max()
    if extent <= limit:
        return ring
    is_nan = np.isnan(extent)
    raise InvalidAnnotationError("polygon has NaN coordinates" if is_nan else FAR_OUTSIDE)


def _rle_from(value: Mapping[str, Any], height: int, width: int) -> Rle:
    size = value.get("size")
    if not isinstance(size, list) or [*map(integer_from, size)] != [height, width]:
        raise InvalidAnnotationError("RLE of another size than the image")
    counts: Any = value.get("counts")
    try:
        if isinstance(counts, list):
            rle = {"size": [height, width], "counts": counts}
            counts = coco_mask.frPyObjects(rle, height, width)["counts"]
        elif isinstance(counts, str):
            counts = counts.encode()
        result = Rle(height, width, counts)
        # Decode the RLE once, to raise an error if its runs do not add up to the number of pixels.
        # pycocotools would leave the remaining pixels uninitialized.
        mask_from_rle(result)
    except (TypeError, ValueError, OverflowError):
        raise InvalidAnnotationError("RLE is damaged") from None
    return result

"""Annotated instances: read from COCO annotations, checked, and drawn as masks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from ...model.masks import Rle, mask_from_rle

Ring = NDArray[np.float64]
"""Corners of a closed polygon as x1, y1, x2, y2, ..., in source pixels; at least three."""

Region = tuple[float, float, float, float]
"""A box xyxy in source pixels."""

_DRAWN_AROUND = 100
"""Outlines are cut off at so many times the size of the mask that is drawn."""


class BrokenAnnotationError(ValueError):
    """An annotation cannot be used; the message is the reason, fit for counting."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One annotated object or crowd."""

    annotation_id: int
    label: int
    """1 is the first class."""
    bbox: tuple[float, float, float, float]
    """x, y, width, height in source pixels, as annotated: it may stick out of the image."""
    area: float
    """Pixels of the object in the source image."""
    is_crowd: bool
    """A region of many objects: ignored in training, forgiving in evaluation."""
    segmentation: tuple[Ring, ...] | Rle
    """Outline; several rings where the object is seen in pieces."""

    def clipped_box(self, height: int, width: int) -> Region:
        """The box, cut at the borders of the image."""
        return _clip(self.bbox, height, width)


def instance_from_annotation(
    annotation: Mapping[str, Any], height: int, width: int, label_by_category: Mapping[int, int]
) -> Instance:
    """Check and convert an entry of a COCO file.

    Args:
        annotation: an entry of the file's `annotations`.
        height: of the annotated image, in pixels.
        width: of the annotated image, in pixels.
        label_by_category: from the file's category ids to labels from 1 on.

    Raises:
        BrokenAnnotationError: the entry cannot be used.
    """
    category = annotation.get("category_id")
    if not isinstance(category, int) or category not in label_by_category:
        raise BrokenAnnotationError("unknown category")
    bbox = _bbox_from(annotation.get("bbox"))
    left, top, right, bottom = _clip(bbox, height, width)
    if right <= left or bottom <= top:
        raise BrokenAnnotationError("box without area inside the image")
    segmentation = _segmentation_from(annotation.get("segmentation"), height, width)
    area = annotation.get("area")
    if not isinstance(area, int | float):
        area = draw_mask(segmentation, (height, width), (height, width)).sum()
    return Instance(
        annotation_id=annotation.get("id", -1),
        label=label_by_category[category],
        bbox=bbox,
        area=float(area),
        is_crowd=bool(annotation.get("iscrowd", 0)),
        segmentation=segmentation,
    )


def draw_mask(
    segmentation: tuple[Ring, ...] | Rle,
    source: tuple[int, int],
    target: tuple[int, int],
    region: Region | None = None,
) -> NDArray[np.uint8]:
    """Mask of a segmentation in a resized image, or in a resized region of it.

    Polygons are scaled and then drawn, so that their edges stay sharp; run lengths are drawn,
    resized with the filter the image is resized with, and cut at one half.

    Args:
        segmentation: outline in source pixels.
        source: height and width of the annotated image.
        target: height and width of the mask.
        region: what becomes the mask, within the image and not empty; none, the whole image.

    Returns:
        `[h, w]` of 0 and 1.
    """
    height, width = target
    left, top, right, bottom = region or (0, 0, source[1], source[0])
    if isinstance(segmentation, Rle):
        picture = Image.fromarray(mask_from_rle(segmentation) * np.uint8(255))
        bilinear = Image.Resampling.BILINEAR
        resized = picture.resize((width, height), bilinear, box=(left, top, right, bottom))
        return (np.asarray(resized) >= 128).astype(np.uint8)
    scale = np.array([width / (right - left), height / (bottom - top)])
    # Drawing walks along every edge, and must not for miles where an outline leaves a tiny region.
    limit = _DRAWN_AROUND * max(target)
    rings = tuple(
        ((ring.reshape(-1, 2) - (left, top)) * scale).clip(-limit, limit).ravel()
        for ring in segmentation
    )
    return mask_from_rle(_rle_from_rings(rings, height, width))


def coco_from_segmentation(
    segmentation: tuple[Ring, ...] | Rle,
) -> list[list[float]] | dict[str, Any]:
    """The `segmentation` of a COCO annotation."""
    if isinstance(segmentation, Rle):
        height, width, counts = segmentation
        return {"size": [height, width], "counts": counts.decode("ascii")}
    return [ring.tolist() for ring in segmentation]


def _bbox_from(value: Any) -> tuple[float, float, float, float]:
    if not isinstance(value, list) or len(value) != 4:
        raise BrokenAnnotationError("box is not four numbers")
    if not all(isinstance(side, int | float) and math.isfinite(side) for side in value):
        raise BrokenAnnotationError("box is not four numbers")
    return (value[0], value[1], value[2], value[3])


def _clip(bbox: tuple[float, float, float, float], height: int, width: int) -> Region:
    x, y, box_width, box_height = bbox
    return (
        min(max(x, 0.0), width),
        min(max(y, 0.0), height),
        min(max(x + box_width, 0.0), width),
        min(max(y + box_height, 0.0), height),
    )


def _segmentation_from(value: Any, height: int, width: int) -> tuple[Ring, ...] | Rle:
    if not value:
        raise BrokenAnnotationError("no segmentation")
    if isinstance(value, dict):
        return _rle_from(value, height, width)
    if not isinstance(value, list):
        raise BrokenAnnotationError("segmentation is neither polygons nor run lengths")
    try:
        rings = [np.array(ring, dtype=np.float64) for ring in value]
    except (TypeError, ValueError):
        raise BrokenAnnotationError("polygon is not a list of numbers") from None
    # A ring of fewer corners covers nothing, and pycocotools takes four numbers for a box.
    usable = tuple(r for r in rings if r.ndim == 1 and r.size >= 6 and r.size % 2 == 0)
    if not usable:
        raise BrokenAnnotationError("polygon of fewer than three points")
    if not all(np.isfinite(ring).all() for ring in usable):
        raise BrokenAnnotationError("polygon is not a list of numbers")
    return usable


def _rle_from(value: Mapping[str, Any], height: int, width: int) -> Rle:
    if value.get("size") != [height, width]:
        raise BrokenAnnotationError("run lengths of another size than the image")
    counts: Any = value.get("counts")
    try:
        if isinstance(counts, list):
            counts = coco_mask.frPyObjects({**value, "counts": counts}, height, width)["counts"]
        elif isinstance(counts, str):
            counts = counts.encode()
        rle = Rle(height, width, counts)
        # Of run lengths that end early, pycocotools leaves the rest of a mask uninitialised.
        mask_from_rle(rle)
    except (TypeError, ValueError, OverflowError):
        raise BrokenAnnotationError("run lengths are damaged") from None
    return rle


def _rle_from_rings(rings: tuple[Ring, ...], height: int, width: int) -> Rle:
    """Run lengths of the union of all rings."""
    union = coco_mask.merge(coco_mask.frPyObjects(list(rings), height, width))
    return Rle(height, width, union["counts"])

"""Find suspicious annotations: valid, but probably wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import shapely
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from ....model.masks import Rle
from ..coco.annotations import Instance
from ..coco.dataset import ImageRecord
from ..coco.segmentation_masks import Ring, Segmentation

# Number of images that are checked at once. A larger number is faster, but needs more memory.
_CHUNK_IMAGES = 4096
# Pixels by which a box or polygon may extend beyond the image.
_MAX_EXCESS = 1.0
# Accepted distance between a side of a box and its segmentation: the larger of a number of pixels
# and a fraction of the box's longer side.
_BOX_TOLERANCE, _BOX_RELATIVE_TOLERANCE = 2.0, 0.05
# Accepted difference of an annotated area from the segmentation's area: a number of square pixels
# (more for long outlines) plus a fraction of the segmentation's area.
_AREA_TOLERANCE, _AREA_RELATIVE_TOLERANCE = 4.0, 0.1
# Minimum width and height of a box, in pixels.
_MIN_SIDE = 2.0
# Two boxes with a higher IoU count as duplicates.
_DUPLICATE_IOU = 0.95
# Areas below this number of square pixels count as zero.
_MIN_AREA = 0.01

_Bools = NDArray[np.bool_]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Suspicious annotation or image file, with the reason."""

    # Reason without details, so that items with equal reasons can be counted.
    reason: str
    record: ImageRecord
    # Suspicious annotation of the image. None: the image file is suspicious.
    instance: Instance | None = None
    detail: str = ""

    @property
    def subject(self) -> str:
        """Annotation id or image path of the suspicious item, followed by `detail` if it is set."""
        name = str(self.instance.annotation_id if self.instance else self.record.path)
        return f"{name}: {self.detail}" if self.detail else name


class _Measurements(NamedTuple):
    """Boxes, areas and outline lengths of N segmentations, in pixels or square pixels."""

    # `[N, 4]` bounding boxes xyxy.
    bounds: _Floats
    # `[N]` lower bound of the area: that of the largest polygon, which may contain the others.
    min_area: _Floats
    # `[N]` upper bound of the area: the sum over all polygons, which may be disjoint.
    max_area: _Floats
    # `[N]` total length of the outlines. Rasterizing changes the area by at most half of it.
    length: _Floats
    # `[N]` whether a polygon crosses or touches itself.
    is_twisted: _Bools
    # `[N]` whether a polygon has no area.
    is_flat: _Bools


def suspicious_annotations(records: Sequence[ImageRecord]) -> list[Suspicion]:
    """Find annotations that are valid but probably wrong, such as boxes outside of the image.

    The result has one entry per annotation and reason, so an annotation can occur several times.
    """
    suspicions = []
    for start in range(0, len(records), _CHUNK_IMAGES):
        suspicions += _suspicious_in(records[start : start + _CHUNK_IMAGES])
    return suspicions


# Suppress overflow warnings: huge coordinates become infinity or NaN, and the annotation is then
# reported as suspicious.
@np.errstate(over="ignore", invalid="ignore")
def _suspicious_in(records: Sequence[ImageRecord]) -> list[Suspicion]:
    pairs = [(record, instance) for record in records for instance in record.instances]
    if not pairs:
        return []
    numbers = np.repeat(np.arange(len(records)), [len(record.instances) for record in records])
    classes = np.array([2 * i.label + i.is_crowd for _, i in pairs])
    boxes = np.array([i.bbox for _, i in pairs], np.float64)
    boxes[:, 2:] += boxes[:, :2]
    limits = np.array([(r.width, r.height) * 2 for r, _ in pairs], np.float64)
    areas = np.array([i.area for _, i in pairs])
    measured = _measure([i.segmentation for _, i in pairs])
    clipped = boxes.clip(0, limits)
    sides = clipped[:, 2:] - clipped[:, :2]
    difference = np.abs(clipped - measured.bounds.clip(0, limits)).max(axis=1)
    reasons = {
        "box or outline sticks out of the image": _exceeds(boxes, limits)
        | _exceeds(measured.bounds, limits),
        "box does not fit the segmentation": difference
        > np.maximum(_BOX_TOLERANCE, _BOX_RELATIVE_TOLERANCE * sides.max(axis=1)),
        "area does not fit the segmentation": _contradicts(areas, measured),
        "box less than 2 pixels wide or high": sides.min(axis=1) < _MIN_SIDE,
        "nearly the same box and class as another": _is_duplicate(
            numbers * (classes.max() + 1) + classes, boxes
        ),
        "segmentation, or one of its polygons, has no area": measured.is_flat,
        "outline crosses or touches itself": measured.is_twisted,
    }
    return [
        Suspicion(reason, *pairs[index])
        for reason, is_suspicious in reasons.items()
        for index in np.flatnonzero(is_suspicious)
    ]


def _exceeds(boxes: _Floats, limits: _Floats) -> _Bools:
    """Return an array `[N]`: whether each box exceeds its image by more than `_MAX_EXCESS` px.

    `boxes` is `[N, 4]` (xyxy); `limits` is `[N, 4]` (width, height, width, height of the image).
    """
    exceeds: _Bools = np.maximum(-boxes, boxes - limits).max(axis=1) > _MAX_EXCESS
    return exceeds


def _contradicts(areas: _Floats, measured: _Measurements) -> _Bools:
    """Return an array `[N]`: whether each annotated area does not fit its segmentation.

    `areas` is `[N]`, in square pixels; `measured` has the measurements of the N segmentations. If
    a polygon crosses or touches itself, the result for its segmentation is False.
    """
    slack = np.maximum(_AREA_TOLERANCE, measured.length / 2)
    low = (1 - _AREA_RELATIVE_TOLERANCE) * measured.min_area - slack
    high = (1 + _AREA_RELATIVE_TOLERANCE) * measured.max_area + slack
    is_possible = (areas >= low) & (areas <= high) & (areas > 0)
    # Do not report polygons that cross themselves, because their area is unknown.
    return ~(is_possible | measured.is_twisted)


def _is_duplicate(group_N: NDArray[np.int64], boxes_N4: _Floats) -> _Bools:
    """Return an array `[N]`: whether each box nearly equals an earlier box of its group.

    Boxes are xyxy, and nearly equal if their IoU exceeds `_DUPLICATE_IOU`. `group_N` identifies the
    group of each box. A group consists of all objects, or all crowds, of the same class in the same
    image.
    """
    # Comparing all pairs would be slow in crowded images. Therefore sort the boxes by their left
    # side, and compare each box with its successors until they are too far to the right for a high
    # IoU.
    order = np.lexsort((boxes_N4[:, 0], group_N))
    group, boxes = group_N[order], boxes_N4[order]
    reach = (1 - _DUPLICATE_IOU) * (boxes[:, 2] - boxes[:, 0])
    is_duplicate = np.zeros(len(boxes), np.bool_)
    first, step = np.arange(len(boxes) - 1), 1
    while first.size:
        second = first + step
        near = group[first] == group[second]
        near &= boxes[second, 0] - boxes[first, 0] <= reach[first]
        first, second = first[near], second[near]
        same = _iou(boxes[first], boxes[second]) > _DUPLICATE_IOU
        is_duplicate[np.maximum(order[first[same]], order[second[same]])] = True
        step += 1
        first = first[first + step < len(boxes)]
    return is_duplicate


def _iou(one_K4: _Floats, other_K4: _Floats) -> _Floats:
    """Return the IoU `[K]` of each box in `one_K4` with the box in the same row of `other_K4`."""
    corner = np.minimum(one_K4[:, 2:], other_K4[:, 2:])
    shared = (corner - np.maximum(one_K4[:, :2], other_K4[:, :2])).clip(0).prod(axis=1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (one_K4, other_K4)]
    overlap: _Floats = shared / (areas[0] + areas[1] - shared)
    return overlap


def _measure(segmentations: Sequence[Segmentation]) -> _Measurements:
    rles = {n: s for n, s in enumerate(segmentations) if isinstance(s, Rle)}
    polygons = {n: s for n, s in enumerate(segmentations) if not isinstance(s, Rle)}
    parts = []
    if rles:
        parts.append(_measure_rles(list(rles.values())))
    if polygons:
        parts.append(_measure_polygons(list(polygons.values())))
    order = np.argsort([*rles, *polygons])
    return _Measurements(*(np.concatenate(column)[order] for column in zip(*parts, strict=True)))


def _measure_rles(rles: Sequence[Rle]) -> _Measurements:
    encoded = [{"size": [rle.height, rle.width], "counts": rle.counts} for rle in rles]
    bounds = coco_mask.toBbox(encoded)
    bounds[:, 2:] += bounds[:, :2]
    # Pass one mask per call: with numpy 2, pycocotools 2.0.11 fails on lists of over 255 masks.
    areas = np.array([coco_mask.area(rle) for rle in encoded], np.float64)
    is_twisted = np.zeros(len(rles), np.bool_)
    return _Measurements(bounds, areas, areas, np.zeros(len(rles)), is_twisted, areas == 0)


def _measure_polygons(segmentations: Sequence[tuple[Ring, ...]]) -> _Measurements:
    rings = [ring for segmentation in segmentations for ring in segmentation]
    points = np.concatenate(rings).reshape(-1, 2)
    owners = np.repeat(np.arange(len(rings)), [ring.size // 2 for ring in rings])
    polygons = np.asarray(shapely.polygons(shapely.linearrings(points, indices=owners)))
    starts = np.cumsum([0, *(len(segmentation) for segmentation in segmentations[:-1])])
    areas, bounds = shapely.area(polygons), shapely.bounds(polygons)
    is_flat = np.asarray(areas < _MIN_AREA)
    # The signed areas of a figure-eight's halves cancel out, but its convex hull has an area.
    is_flat[is_flat] = shapely.area(shapely.convex_hull(polygons[is_flat])) < _MIN_AREA
    return _Measurements(
        bounds=np.concatenate(
            [
                np.minimum.reduceat(bounds[:, :2], starts),
                np.maximum.reduceat(bounds[:, 2:], starts),
            ],
            axis=1,
        ),
        min_area=np.maximum.reduceat(areas, starts),
        max_area=np.add.reduceat(areas, starts),
        length=np.add.reduceat(shapely.length(polygons), starts),
        is_twisted=np.logical_or.reduceat(~shapely.is_valid(polygons) & ~is_flat, starts),
        is_flat=np.logical_or.reduceat(is_flat, starts),
    )

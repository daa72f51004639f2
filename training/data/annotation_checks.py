"""Annotations that can be used, but look wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import shapely
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from ...model.masks import Rle
from .coco import ImageRecord
from .instances import Instance, Ring

_RECORDS_A_CHUNK = 4096
"""Enough for numpy to be quick, few enough for a copy of their outlines to be small."""
_PIXELS_OUTSIDE = 1.0
_PIXELS_OFF = 2.0
_SHARE_OFF = 0.05
_AREA_PIXELS_OFF = 4.0
_AREA_SHARE_OFF = 0.1
_TINY_SIDE = 2.0
_SAME_BOX = 0.95
_NO_AREA = 0.01

_Bools = NDArray[np.bool_]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Something that looks wrong in an image."""

    reason: str
    """Fit for counting."""
    record: ImageRecord
    instance: Instance | None = None
    """None where the image as a whole is meant."""
    detail: str = ""

    @property
    def subject(self) -> str:
        """The annotation's id, or the file's name."""
        name = str(self.instance.annotation_id if self.instance else self.record.path)
        return f"{name}: {self.detail}" if self.detail else name


class _Outlines(NamedTuple):
    """What N segmentations cover, in source pixels."""

    bounds: _Floats
    """`[N, 4]` xyxy."""
    least_area: _Floats
    """`[N]`, if the rings lie within each other."""
    most_area: _Floats
    """`[N]`, if no rings overlap."""
    length: _Floats
    """`[N]`, of all rings: drawn as pixels, an outline gains or loses half of that at most."""
    is_twisted: _Bools
    """`[N]`, a ring crosses or touches itself."""
    is_flat: _Bools
    """`[N]`, a ring has no area."""


def suspicious_annotations(records: Sequence[ImageRecord]) -> list[Suspicion]:
    """What looks wrong in the annotations, ordered by image within every few thousand images."""
    found = []
    for start in range(0, len(records), _RECORDS_A_CHUNK):
        found += _suspicious_in(records[start : start + _RECORDS_A_CHUNK])
    return found


# Absurd coordinates overflow, and are found by what comes of it.
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
    outlines = _measure([i.segmentation for _, i in pairs])
    clipped = boxes.clip(0, limits)
    sides = clipped[:, 2:] - clipped[:, :2]
    off = np.abs(clipped - outlines.bounds.clip(0, limits)).max(axis=1)
    reasons = {
        "box or outline sticks out of the image": _leaves(boxes, limits)
        | _leaves(outlines.bounds, limits),
        "box does not fit the segmentation": off
        > np.maximum(_PIXELS_OFF, _SHARE_OFF * sides.max(axis=1)),
        "area does not fit the segmentation": _contradicts(areas, outlines),
        "box less than 2 pixels wide or high": sides.min(axis=1) < _TINY_SIDE,
        "nearly the same box and class as another": _repeats(
            numbers * (classes.max() + 1) + classes, boxes
        ),
        "segmentation or piece of it without area": outlines.is_flat,
        "outline crosses or touches itself": outlines.is_twisted,
    }
    return [
        Suspicion(reason, *pairs[index])
        for reason, is_suspicious in reasons.items()
        for index in np.flatnonzero(is_suspicious)
    ]


def _leaves(boxes: _Floats, limits: _Floats) -> _Bools:
    excess = np.maximum(-boxes, boxes - limits).max(axis=1)
    leaves: _Bools = excess > _PIXELS_OUTSIDE
    return leaves


def _contradicts(areas: _Floats, outlines: _Outlines) -> _Bools:
    """Whether areas are not such as the outlines could have; of twisted ones, that is unknown."""
    slack = np.maximum(_AREA_PIXELS_OFF, outlines.length / 2)
    least = (1 - _AREA_SHARE_OFF) * outlines.least_area - slack
    most = (1 + _AREA_SHARE_OFF) * outlines.most_area + slack
    fits = (areas >= least) & (areas <= most) & (areas > 0)
    return ~(fits | outlines.is_twisted)


def _repeats(group_N: NDArray[np.int64], boxes_N4: _Floats) -> _Bools:
    """Whether a box nearly equals an earlier one of its group.

    Boxes sorted by their left side are compared with their successors for as long as these could
    still overlap enough: all pairs of a crowded image would be too many.
    """
    order = np.lexsort((boxes_N4[:, 0], group_N))
    group, boxes = group_N[order], boxes_N4[order]
    reach = (1 - _SAME_BOX) * (boxes[:, 2] - boxes[:, 0])
    repeats = np.zeros(len(boxes), np.bool_)
    first, step = np.arange(len(boxes) - 1), 1
    while first.size:
        second = first + step
        near = group[first] == group[second]
        near &= boxes[second, 0] - boxes[first, 0] <= reach[first]
        first, second = first[near], second[near]
        same = _iou(boxes[first], boxes[second]) > _SAME_BOX
        repeats[np.maximum(order[first[same]], order[second[same]])] = True
        step += 1
        first = first[first + step < len(boxes)]
    return repeats


def _iou(one_K4: _Floats, other_K4: _Floats) -> _Floats:
    """Overlap of each box with the other of its row."""
    corner = np.minimum(one_K4[:, 2:], other_K4[:, 2:])
    shared = (corner - np.maximum(one_K4[:, :2], other_K4[:, :2])).clip(0).prod(axis=1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (one_K4, other_K4)]
    overlap: _Floats = shared / (areas[0] + areas[1] - shared)
    return overlap


def _measure(segmentations: Sequence[tuple[Ring, ...] | Rle]) -> _Outlines:
    runs = {n: s for n, s in enumerate(segmentations) if isinstance(s, Rle)}
    rings = {n: s for n, s in enumerate(segmentations) if not isinstance(s, Rle)}
    parts = []
    if runs:
        parts.append(_outlines_from_runs(list(runs.values())))
    if rings:
        parts.append(_outlines_from_rings(list(rings.values())))
    order = np.argsort([*runs, *rings])
    return _Outlines(*(np.concatenate(column)[order] for column in zip(*parts, strict=True)))


def _outlines_from_runs(rles: Sequence[Rle]) -> _Outlines:
    encoded = [{"size": [rle.height, rle.width], "counts": rle.counts} for rle in rles]
    bounds = coco_mask.toBbox(encoded)
    bounds[:, 2:] += bounds[:, :2]
    # One by one, because pycocotools 2.0.11 fails with numpy 2 on a list of more than 255.
    areas = np.array([coco_mask.area(rle) for rle in encoded], np.float64)
    nowhere = np.zeros(len(rles), np.bool_)
    return _Outlines(bounds, areas, areas, np.zeros(len(rles)), nowhere, areas == 0)


def _outlines_from_rings(segmentations: Sequence[tuple[Ring, ...]]) -> _Outlines:
    rings = [ring for segmentation in segmentations for ring in segmentation]
    points = np.concatenate(rings).reshape(-1, 2)
    owners = np.repeat(np.arange(len(rings)), [ring.size // 2 for ring in rings])
    polygons = np.asarray(shapely.polygons(shapely.linearrings(points, indices=owners)))
    starts = np.cumsum([0, *(len(segmentation) for segmentation in segmentations[:-1])])
    areas, bounds = shapely.area(polygons), shapely.bounds(polygons)
    is_flat = np.asarray(areas < _NO_AREA)
    # The halves of a figure of eight cancel out too, but not those of what surrounds it.
    is_flat[is_flat] = shapely.area(shapely.convex_hull(polygons[is_flat])) < _NO_AREA
    return _Outlines(
        bounds=np.concatenate(
            [
                np.minimum.reduceat(bounds[:, :2], starts),
                np.maximum.reduceat(bounds[:, 2:], starts),
            ],
            axis=1,
        ),
        least_area=np.maximum.reduceat(areas, starts),
        most_area=np.add.reduceat(areas, starts),
        length=np.add.reduceat(shapely.length(polygons), starts),
        is_twisted=np.logical_or.reduceat(~shapely.is_valid(polygons) & ~is_flat, starts),
        is_flat=np.logical_or.reduceat(is_flat, starts),
    )

"""The outlines of masks, traced between the samples of their probabilities."""

from typing import Final, NamedTuple, cast

import numpy as np
from contourpy import FillType, contour_generator
from numpy.typing import NDArray

from ...model.masks import MaskPaste, whole_pixel_boxes
from ..detections import Outlines

_THRESHOLD: Final = 0.5

_Chunks = tuple[
    list[NDArray[np.float64] | None],
    list[NDArray[np.uint32] | None],
    list[NDArray[np.uint32] | None],
]
"""contourpy's points of all rings, where among them each begins, and which of these are outer ones
that their holes follow; all with the end as one more. None where there are no rings."""


def polygons_from_probabilities(
    masks: NDArray[np.float32],
    boxes: NDArray[np.float32],
    height: int,
    width: int,
    paste: MaskPaste = "torchvision",
) -> list[Outlines]:
    """Outline in the image where mask probabilities exceed one half.

    Polygons enclose what `model.masks.rles_from_probabilities` encodes, but are not bound to its
    pixels: they pass between two samples where a line from one probability to the other is one
    half. Zeros lie around a mask. COCO's polygons know no holes: only outer outlines are given.

    Args:
        masks: [N, M, M] probabilities.
        boxes: [N, 4] xyxy in pixels of the image.
        height: Pixels of the image, to which polygons are clipped.
        width: Pixels of the image, to which polygons are clipped.
        paste: Whose rule places the probabilities.

    Returns:
        The outlines of each mask in pixels of the image; none where nothing of it has an area.
    """
    found: list[list[NDArray[np.float32]]] = [[] for _ in masks]
    if not found:
        return []
    rings = _outer_rings(masks)
    origins, cells = _grids(boxes, masks.shape[-1], paste)
    placed = origins[rings.owners] + rings.points * cells[rings.owners]
    points = placed.clip(0, [width, height]).astype(np.float32)
    moves = (points[1:] != points[:-1]).any(axis=1)
    for begin, last in rings.bounds:
        ring = points[begin:last][moves[begin:last]]
        if _area(ring) > 0:
            found[rings.owners[begin]].append(ring)
    return [tuple(outlines) for outlines in found]


class _Rings(NamedTuple):
    """The closed outlines of N masks, in samples from the corner of a mask with its border."""

    points: NDArray[np.float64]
    """[P, 2] x, y; in between may be those of holes."""
    owners: NDArray[np.intp]
    """[P] which mask a point belongs to."""
    bounds: list[tuple[int, int]]
    """First and last point of each, which are equal."""


def _outer_rings(masks: NDArray[np.float32]) -> _Rings:
    """Trace masks [N, M, M] of which there is at least one."""
    bordered = np.pad(masks, ((0, 0), (1, 1), (1, 1)))
    side = bordered.shape[-1]
    # One below the other, as a call of contourpy takes longer than what it does with a mask.
    column = bordered.reshape(-1, side)
    generator = contour_generator(z=column, fill_type=FillType.ChunkCombinedOffsetOffset)
    chunks = generator.filled(_THRESHOLD, np.inf)
    (points,), (ring_starts,), (outer,) = cast(_Chunks, chunks)
    if points is None or ring_starts is None or outer is None:
        return _Rings(np.zeros((0, 2)), np.zeros(0, np.intp), [])
    owners = (points[:, 1] // side).astype(np.intp)
    points[:, 1] -= owners * side
    begins, ends = ring_starts[outer[:-1]], ring_starts[outer[:-1] + 1]
    return _Rings(
        points + 0.5, owners, list(zip(begins.tolist(), (ends - 1).tolist(), strict=True))
    )


def _grids(
    boxes: NDArray[np.float32], side: int, paste: MaskPaste
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where in the image the samples of masks with their borders lie.

    Returns:
        [N, 2] corner of the first sample, and [N, 2] width and height of a sample, x before y.
    """
    if paste == "detectron2":
        starts, stops = np.split(boxes, 2, axis=1)
        cells = (stops - starts).astype(np.float64) / side
        return starts - cells, cells
    first, last = np.split(whole_pixel_boxes(boxes, side), 2, axis=1)
    return first.astype(np.float64), np.maximum(last - first + 1, 1) / (side + 2)


def _area(ring: NDArray[np.float32]) -> float:
    """Twice the area of a ring [P, 2]; exactly 0 where it is flat, along an edge of the image."""
    x, y = (ring - ring[:1]).astype(np.float64).T
    return float(x[:-1] @ y[1:] - x[1:] @ y[:-1])

"""Postprocessing on the CPU: model outputs to detections with masks or polygons."""

from collections.abc import Iterable
from typing import Final, NamedTuple, cast

import numpy as np
from contourpy import FillType, contour_generator
from numpy.typing import NDArray

from ...model.bundle.manifest import BundleError, Manifest
from ...model.masks import MaskPaste, Rle, rles_from_probabilities, whole_pixel_boxes
from ..backends.base import HostOutputs
from ..detections import DetectionOptions, Detections, MaskFormat, Outlines
from .base import ModelInput, PlannedImage

# Mask probability along which outlines are traced.
_THRESHOLD: Final = 0.5

# Output of contourpy with the fill type ChunkCombinedOffsetOffset: the points of all rings; the
# index of each ring's first point; and the index of each polygon's first ring. A polygon is an
# outer ring, followed by its holes. Both arrays of indices end with the total number. Each list has
# one item per chunk, a part of the input that contourpy processes separately. Here, the whole input
# is one chunk. None: the chunk has no rings.
_Chunks = tuple[
    list[NDArray[np.float64] | None],
    list[NDArray[np.uint32] | None],
    list[NDArray[np.uint32] | None],
]


def detections_from_outputs(
    outputs: HostOutputs,
    row: int,
    image: ModelInput | PlannedImage,
    manifest: Manifest,
    options: DetectionOptions,
) -> Detections:
    """Convert the model's outputs for one image of a batch to detections.

    Args:
        outputs: Outputs of the batch.
        row: Index of the image in the batch.
        image: The image. Only its sizes are used.
        manifest: Manifest of the model's bundle.
        options: Options that select the detections to keep and their mask format.

    Raises:
        BundleError: the bundle has no category for a label.
    """
    kept = kept_rows(outputs.scores[row, : outputs.num_detections[row]], options)
    boxes = _source_boxes(outputs.boxes[row, kept], image)
    probabilities = outputs.masks[row, kept]
    rles = None
    if options.mask_format is MaskFormat.RLE:
        source, paste = image.source_size, manifest.mask_paste
        rles = rles_from_probabilities(probabilities, boxes, *source, paste=paste)
    return detections_from_rows(
        boxes,
        outputs.scores[row, kept],
        outputs.labels[row, kept],
        image.source_size,
        manifest,
        mask_format=options.mask_format,
        rles=rles,
        probabilities=probabilities,
    )


def kept_rows(scores: NDArray[np.float32], options: DetectionOptions) -> NDArray[np.intp]:
    """Return the indices of the detections that `options` select. `scores` [N] are descending."""
    return np.flatnonzero(scores > options.score_threshold)[: options.max_detections]


def detections_from_rows(
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    labels: NDArray[np.int64],
    source_size: tuple[int, int],
    manifest: Manifest,
    *,
    mask_format: MaskFormat,
    rles: Iterable[Rle] | None,
    probabilities: NDArray[np.float32] | None,
) -> Detections:
    """Build the detections of an image, with the bundle's category names.

    Args:
        boxes: [N, 4] xyxy in pixels of the source image.
        scores: [N] in 0..1.
        labels: [N]; 1 is the first class.
        source_size: Height and width of the source image in pixels.
        manifest: Manifest of the bundle.
        mask_format: Requested mask format.
        rles: N masks of the source image. None: RLE masks are not requested.
        probabilities: [N, M, M] mask probabilities within the boxes. None: neither probabilities
            nor polygons are requested.

    Raises:
        BundleError: the bundle has no category for a label.
    """
    unknown = labels[(labels < 1) | (labels > len(manifest.categories))]
    if unknown.size:
        raise BundleError(
            f"the model returned label {unknown[0]}, but the bundle's manifest has "
            f"{len(manifest.categories)} categories; export the bundle again"
        )
    chosen = [manifest.categories[label - 1] for label in labels.tolist()]
    polygons = None
    if mask_format is MaskFormat.POLYGON and probabilities is not None:
        polygons = tuple(
            polygons_from_probabilities(probabilities, boxes, *source_size, manifest.mask_paste)
        )
    return Detections(
        height=source_size[0],
        width=source_size[1],
        boxes=boxes,
        scores=scores,
        labels=labels,
        category_ids=np.array([category.id for category in chosen], np.int64),
        class_names=tuple(category.name for category in chosen),
        rles=None if rles is None else tuple(rles),
        mask_probabilities=probabilities if mask_format is MaskFormat.PROBABILITIES else None,
        polygons=polygons,
    )


def _source_boxes(
    boxes: NDArray[np.float32], image: ModelInput | PlannedImage
) -> NDArray[np.float32]:
    """Scale boxes [N, 4] xyxy from the resized to the source image. Clip them to the source image.

    As in torchvision, x and y are scaled by separate factors.
    """
    source_height, source_width = image.source_size
    height, width = image.size
    limits = np.array([source_width, source_height] * 2, np.float32)
    ratios = limits / np.array([width, height] * 2, np.float32)
    return np.clip(boxes * ratios, 0, limits)


def polygons_from_probabilities(
    masks: NDArray[np.float32],
    boxes: NDArray[np.float32],
    height: int,
    width: int,
    paste: MaskPaste = "torchvision",
) -> list[Outlines]:
    """Trace the outlines of masks at probability one half, with subpixel accuracy.

    The polygons enclose the area of the RLE masks of `model.masks.rles_from_probabilities`.
    Probabilities are interpolated linearly between samples. Samples outside a mask's M x M samples
    are zero. Holes are dropped, because COCO polygons cannot represent them.

    Args:
        masks: [N, M, M] probabilities.
        boxes: [N, 4] xyxy in pixels of the image.
        height: Height of the image in pixels. Polygons are clipped to the image.
        width: Width of the image in pixels.
        paste: Rule for the positions of the mask's samples in the image. `torchvision` rounds the
            box to whole pixels, `detectron2` uses the exact box.

    Returns:
        For each mask, a tuple of outlines, each [P, 2] x, y in pixels of the image. The tuple is
        empty if the mask has no area in the image.
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
    """Outer outlines of N masks, as closed rings of points.

    The unit of the coordinates is one sample of a mask. Each mask was padded with one sample of
    zeros on each side. The origin is the top left corner of the padded mask.
    """

    # [P, 2] x, y. Includes the points of holes, which `bounds` leaves out.
    points: NDArray[np.float64]
    # [P] index of the mask that each point belongs to.
    owners: NDArray[np.intp]
    # Indices of the first and last point of each outline. These points are equal.
    bounds: list[tuple[int, int]]


def _outer_rings(masks: NDArray[np.float32]) -> _Rings:
    """Trace the outer outlines of masks [N, M, M]. N is at least 1."""
    bordered = np.pad(masks, ((0, 0), (1, 1), (1, 1)))
    side = bordered.shape[-1]
    # Stack all masks in one array, because a call of contourpy costs more than tracing a mask.
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
    """Return the position and scale of each mask's grid of samples, in pixels of the image.

    A mask has `side` x `side` samples and is padded with one sample of zero on each side. The grid
    includes this padding.

    Returns:
        [N, 2] x, y of the grids' top left corners, and [N, 2] width and height of one sample.
    """
    if paste == "detectron2":
        starts, stops = np.split(boxes, 2, axis=1)
        cells = (stops - starts).astype(np.float64) / side
        return starts - cells, cells
    first, last = np.split(whole_pixel_boxes(boxes, side), 2, axis=1)
    return first.astype(np.float64), np.maximum(last - first + 1, 1) / (side + 2)


def _area(ring: NDArray[np.float32]) -> float:
    """Return twice the signed area of a ring [P, 2]. 0.0 if all points are on one image edge."""
    x, y = (ring - ring[:1]).astype(np.float64).T
    return float(x[:-1] @ y[1:] - x[1:] @ y[:-1])

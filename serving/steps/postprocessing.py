"""From the model's outputs to detections in pixels of the source image."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...model.manifest import BundleError, Manifest
from ...model.masks import MaskPaste, Rle, rles_from_probabilities
from ..backends.base import Outputs
from ..detections import DetectionOptions, Detections, MaskFormat, Outlines
from .polygons import polygons_from_probabilities


class Scaled(Protocol):
    """An image as the model saw it, beside the one it was made of."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels before padding."""

    @property
    def source_size(self) -> tuple[int, int]:
        """Height and width of the source image in pixels."""


def detections_from_outputs(
    outputs: Outputs, row: int, image: Scaled, manifest: Manifest, options: DetectionOptions
) -> Detections:
    """The detections of the image in one row of a batch.

    Args:
        outputs: Outputs of the batch.
        row: Place of the image in the batch.
        image: The image at that place.
        manifest: Of the bundle that gave the outputs.
        options: Which detections to keep, and the form of their masks.

    Raises:
        BundleError: the bundle has no name for a label.
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
    """Which detections to keep, by their scores [N] in descending order."""
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
    """The detections of an image with the names that the bundle gives them.

    Args:
        boxes: [N, 4] xyxy in pixels of the source image.
        scores: [N].
        labels: [N]; 1 is the first class.
        source_size: Height and width of the source image in pixels.
        manifest: Of the bundle.
        mask_format: Form of the masks.
        rles: N masks of the source image, where they are wanted.
        probabilities: [N, M, M], where they or the polygons that they give are wanted.

    Raises:
        BundleError: the bundle has no name for a label.
    """
    unknown = labels[(labels < 1) | (labels > len(manifest.categories))]
    if unknown.size:
        raise BundleError(
            f"the model gives label {unknown[0]}, but the bundle's manifest has "
            f"{len(manifest.categories)} categories; export the bundle again"
        )
    chosen = [manifest.categories[label - 1] for label in labels.tolist()]
    outlined = probabilities if mask_format is MaskFormat.POLYGON else None
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
        polygons=_polygons(outlined, boxes, source_size, manifest.mask_paste),
    )


def _polygons(
    probabilities: NDArray[np.float32] | None,
    boxes: NDArray[np.float32],
    source_size: tuple[int, int],
    paste: MaskPaste,
) -> tuple[Outlines, ...] | None:
    if probabilities is None:
        return None
    return tuple(polygons_from_probabilities(probabilities, boxes, *source_size, paste))


def _source_boxes(boxes: NDArray[np.float32], image: Scaled) -> NDArray[np.float32]:
    """Scale [N, 4] by torchvision's rule, each axis by its own ratio, and clip to the image."""
    source_height, source_width = image.source_size
    height, width = image.size
    limits = np.array([source_width, source_height] * 2, np.float32)
    ratios = limits / np.array([width, height] * 2, np.float32)
    return np.clip(boxes * ratios, 0, limits)

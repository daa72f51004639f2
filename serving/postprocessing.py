"""From the model's outputs to detections in pixels of the source image."""

import numpy as np
from numpy.typing import NDArray

from ..model.manifest import Manifest
from ..model.masks import rles_from_probabilities
from .backends.base import Outputs
from .detections import DetectionOptions, Detections, MaskFormat
from .preprocessing import ModelInput


def detections_from_outputs(
    outputs: Outputs,
    row: int,
    image: ModelInput,
    manifest: Manifest,
    options: DetectionOptions,
) -> Detections:
    """The detections of the image in one row of a batch.

    Args:
        outputs: Outputs of the batch.
        row: Place of the image in the batch.
        image: The image at that place.
        manifest: Of the bundle that gave the outputs.
        options: Which detections to keep, and the form of their masks.
    """
    eligible = outputs.scores[row, : outputs.num_detections[row]] > options.score_threshold
    kept = np.flatnonzero(eligible)[: options.max_detections]
    labels = outputs.labels[row, kept]
    boxes = _source_boxes(outputs.boxes[row, kept], image)
    probabilities = outputs.masks[row, kept]
    chosen = [manifest.categories[label - 1] for label in labels]
    rles = None
    if options.mask_format is MaskFormat.RLE:
        source, paste = image.source_size, manifest.mask_paste
        rles = tuple(rles_from_probabilities(probabilities, boxes, *source, paste=paste))
    wants_probabilities = options.mask_format is MaskFormat.PROBABILITIES
    return Detections(
        height=image.source_size[0],
        width=image.source_size[1],
        boxes=boxes,
        scores=outputs.scores[row, kept],
        labels=labels,
        category_ids=np.array([category.id for category in chosen], np.int64),
        class_names=tuple(category.name for category in chosen),
        rles=rles,
        mask_probabilities=probabilities if wants_probabilities else None,
    )


def _source_boxes(boxes: NDArray[np.float32], image: ModelInput) -> NDArray[np.float32]:
    """Scale [N, 4] by torchvision's rule, each axis by its own ratio, and clip to the image."""
    source_height, source_width = image.source_size
    height, width = image.size
    limits = np.array([source_width, source_height] * 2, np.float32)
    ratios = limits / np.array([width, height] * 2, np.float32)
    return np.clip(boxes * ratios, 0, limits)

"""Convert the model's padded batch outputs to detections per image."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...model.mask_rcnn import BatchDetections
from ...model.masks import MaskPaste, Rle, rles_from_probabilities
from ..data.loading.batches import Batch


class ImageDetections(NamedTuple):
    """D detections of one image, in pixels of the original image."""

    # [D, 4] xyxy.
    boxes: NDArray[np.float32]
    # [D].
    scores: NDArray[np.float32]
    # [D]; 1 is the first class.
    labels: NDArray[np.int64]
    # D masks of the size of the original image.
    masks: list[Rle]


def image_detections_from(
    detections: BatchDetections, batch: Batch, paste: MaskPaste
) -> list[tuple[int, ImageDetections]]:
    """Scale a batch's detections to the original images and paste their masks.

    Args:
        detections: Output of the model.
        batch: Input of the model.
        paste: Rule for resampling masks to the original images.

    Returns:
        Pairs of image id and detections, one per image of the batch.
    """
    counts = detections.num_detections.tolist()
    labels_BD = detections.labels.cpu().numpy()
    boxes_BD4, scores_BD, masks_BDMM = (
        tensor.float().cpu().numpy()
        for tensor in (detections.boxes, detections.scores, detections.masks)
    )
    scale_B2 = _float32(batch.source_sizes) / _float32(batch.image_sizes)
    results = []
    for number, image_id in enumerate(batch.image_ids.tolist()):
        count = counts[number]
        height, width = batch.source_sizes[number].tolist()
        boxes = boxes_BD4[number, :count] * scale_B2[number, [1, 0, 1, 0]]
        masks = rles_from_probabilities(
            masks_BDMM[number, :count], boxes, height, width, paste=paste
        )
        image = ImageDetections(boxes, scores_BD[number, :count], labels_BD[number, :count], masks)
        results.append((image_id, image))
    return results


def _float32(sizes: Tensor) -> NDArray[np.float32]:
    return sizes.cpu().numpy().astype(np.float32)

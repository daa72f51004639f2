"""Detections as plain arrays, the form that `numpy.savez` writes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.masks import mask_from_rle
from ..detections import Detections


def arrays_from_detections(detections: Detections) -> dict[str, NDArray[Any]]:
    """The arrays of N detections by name, none of which needs pickle.

    `boxes` [N, 4] float32 xyxy in pixels of the source image, `scores` [N] float32, `labels` and
    `category_ids` [N] int64, `class_names` [N] str, `size` [2] int64 height and width; `masks`
    [N, height, width] bool if the detections have run-length encoded ones.
    """
    size = (detections.height, detections.width)
    arrays: dict[str, NDArray[Any]] = {
        "boxes": detections.boxes,
        "scores": detections.scores,
        "labels": detections.labels,
        "category_ids": detections.category_ids,
        "class_names": np.array(detections.class_names, np.str_),
        "size": np.array(size, np.int64),
    }
    if detections.rles is not None:
        masks = [mask_from_rle(rle) for rle in detections.rles]
        arrays["masks"] = np.array(masks, np.bool_).reshape(-1, *size)
    return arrays

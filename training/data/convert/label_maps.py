"""Convert label maps (PNG images whose pixel values identify objects) to COCO annotations."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from ....model.masks import Rle, coco_from_rle
from ..coco.dataset import DataError


class LabelledObject(NamedTuple):
    """Category and crowd flag of the object that a pixel value of a label map identifies."""

    category_id: int
    is_crowd: bool = False


def read_label_map(path: Path, modes: Collection[str]) -> NDArray[np.int64]:
    """Read the pixel values `[H, W]` of a PNG file, or the palette indices of a palette image.

    Args:
        path: The PNG file.
        modes: Accepted pixel formats, as Pillow modes such as "P".

    Raises:
        DataError: The file cannot be read, or its pixels have another format.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            mode, pixels = image.mode, np.asarray(image)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist, but the data set needs this label map; copy it from the "
            "original data set"
        ) from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} is not a readable PNG file: {error}; replace it by the file of the original "
            "data set"
        ) from None
    if mode not in modes:
        raise DataError(
            f"{path} has pixels of format {mode}, not {' or '.join(sorted(modes))}: it is not a "
            "label map, or was re-saved in colour; use the original file"
        )
    return pixels.astype(np.int64)


def values_in(labels: NDArray[np.int64]) -> list[int]:
    """Return the distinct values (all >= 0) of a label map `[H, W]` in ascending order."""
    values: list[int] = np.flatnonzero(np.bincount(labels.ravel())).tolist()
    return values


def annotations_from_label_map(
    labels: NDArray[np.int64], objects: Mapping[int, LabelledObject]
) -> list[dict[str, Any]]:
    """Return a COCO annotation, without `id` and `image_id`, for each of the objects.

    Args:
        labels: Label map `[H, W]`.
        objects: Object by pixel value. Each of these values must occur in the map. Pixels with
            other values are background.
    """
    height, width = labels.shape
    columns = labels.T.ravel()
    # Find the RLE runs of all objects in one pass, which is faster than one mask per object.
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    ends = np.append(starts[1:], columns.size)
    values = columns[starts]
    annotations = []
    for value, (category_id, is_crowd) in objects.items():
        selected = values == value
        edges = np.stack([starts[selected], ends[selected]], axis=1).ravel()
        runs = np.diff(edges[edges < columns.size], prepend=0, append=columns.size)
        uncompressed = {"size": [height, width], "counts": runs.tolist()}
        rle = coco_mask.frPyObjects(uncompressed, height, width)
        annotations.append(
            {
                "category_id": category_id,
                "bbox": coco_mask.toBbox(rle).tolist(),
                "area": int(coco_mask.area(rle)),
                "iscrowd": int(is_crowd),
                "segmentation": coco_from_rle(Rle(height, width, rle["counts"])),
            }
        )
    return annotations

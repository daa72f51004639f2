"""Label maps, images whose pixels name objects: read, and turned into COCO annotations."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from .coco import DataError


class LabelledObject(NamedTuple):
    """What a value of a label map stands for."""

    category_id: int
    is_crowd: bool = False


def read_label_map(path: Path, modes: Collection[str]) -> NDArray[np.int64]:
    """Values `[H, W]` of the pixels of a PNG; of a palette image, the indices.

    Args:
        path: the file.
        modes: Pillow's names of the pixel formats that hold labels; colours do not.

    Raises:
        DataError: the file cannot be read, or its pixels are of another format.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            mode, pixels = image.mode, np.asarray(image)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is no readable PNG: {error}") from None
    if mode not in modes:
        raise DataError(
            f"{path} has pixels of format {mode}, not {' or '.join(sorted(modes))}: it is no label "
            "map, or was saved anew in colours; take the original file"
        )
    return pixels.astype(np.int64)


def values_in(labels: NDArray[np.int64]) -> list[int]:
    """The different values of a label map `[H, W]`, ascending; none may be negative."""
    found: list[int] = np.flatnonzero(np.bincount(labels.ravel())).tolist()
    return found


def annotations_from_label_map(
    labels: NDArray[np.int64], objects: Mapping[int, LabelledObject]
) -> list[dict[str, Any]]:
    """COCO annotations, without ids of their own and of the image, in the order of the objects.

    Args:
        labels: `[H, W]`.
        objects: what its values stand for; other values are background. Each must be in the map.
    """
    height, width = labels.shape
    columns = labels.T.ravel()
    # The runs of all objects in one pass: a comparison of the whole image for each is slow.
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    ends = np.append(starts[1:], columns.size)
    values = columns[starts]
    annotations = []
    for value, (category_id, is_crowd) in objects.items():
        own = values == value
        edges = np.stack([starts[own], ends[own]], axis=1).ravel()
        runs = np.diff(edges[edges < columns.size], prepend=0, append=columns.size)
        uncompressed = {"size": [height, width], "counts": runs.tolist()}
        rle = coco_mask.frPyObjects(uncompressed, height, width)
        annotations.append(
            {
                "category_id": category_id,
                "bbox": coco_mask.toBbox(rle).tolist(),
                "area": int(coco_mask.area(rle)),
                "iscrowd": int(is_crowd),
                "segmentation": {"size": [height, width], "counts": rle["counts"].decode("ascii")},
            }
        )
    return annotations

"""Rasterize polygons and COCO RLE to masks of a given size."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from ....model.masks import Rle, mask_from_rle

# Polygon of three or more vertices as x1, y1, x2, y2, ..., in pixels of the original image.
Ring = NDArray[np.float64]

# Polygons of one object, or its mask as COCO RLE.
Segmentation = tuple[Ring, ...] | Rle

# Box xyxy in pixels of the original image.
Region = tuple[float, float, float, float]

# Scaled coordinates are clipped to this multiple of the mask's longer side.
_CLIP_FACTOR = 100
# Maximum scale of coordinates. An infinite scale, of a box narrower than 1e-306 pixels, would give
# NaN.
_MAX_SCALE = 1e30


def mask_from_segmentation(
    segmentation: Segmentation,
    source: tuple[int, int],
    target: tuple[int, int],
    region: Region | None = None,
) -> NDArray[np.uint8]:
    """Rasterize an object's segmentation to a mask of a given size.

    Args:
        segmentation: Polygons or RLE in pixels of the original image.
        source: Height and width of the original image.
        target: Height h and width w of the mask.
        region: Box that the mask covers: xyxy in pixels of the original image, not empty, and
            inside the image. None: the whole image.

    Returns:
        Mask `[h, w]` of 0 and 1.
    """
    height, width = target
    left, top, right, bottom = region or (0, 0, source[1], source[0])
    if isinstance(segmentation, Rle):
        return resized_mask(mask_from_rle(segmentation), target, (left, top, right, bottom))
    # Vertices are scaled before they are rasterized, so that edges stay sharp.
    scale = np.array([width / (right - left), height / (bottom - top)]).clip(max=_MAX_SCALE)
    # Rasterizing takes time proportional to the edge length. If the region is tiny compared with
    # the object, the scaled edges are huge, so clip the coordinates.
    limit = _CLIP_FACTOR * max(target)
    rings = [
        ((ring.reshape(-1, 2) - (left, top)) * scale).clip(-limit, limit).ravel()
        for ring in segmentation
    ]
    union = coco_mask.merge(coco_mask.frPyObjects(rings, height, width))
    return mask_from_rle(Rle(height, width, union["counts"]))


def resized_mask(
    mask: NDArray[np.uint8], target: tuple[int, int], region: Region
) -> NDArray[np.uint8]:
    """Crop a mask [H, W] to a box, and resize the crop to `target` (h, w).

    `region` is the box: xyxy in pixels of `mask`. Both masks contain 0 and 1.
    """
    # Use the filter with which the image is resized, so that mask and image stay aligned.
    image = Image.fromarray(mask * np.uint8(255))
    resized = image.resize(target[::-1], Image.Resampling.BILINEAR, box=region)
    return (np.asarray(resized) >= 128).astype(np.uint8)

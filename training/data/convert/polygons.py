"""Convert polygons to COCO annotations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# [n, 2] x and y in pixels.
Points = NDArray[np.float64]


def annotation_from_polygons(category_id: int, polygons: Sequence[Points]) -> dict[str, Any]:
    """Return the COCO annotation, without `id` and `image_id`, of an object.

    Args:
        category_id: Category of the object.
        polygons: Outlines of the object's visible regions in pixels, each `[N, 2]` (x, y) with
            N >= 3.
    """
    points = np.concatenate(polygons)
    low, high = points.min(axis=0), points.max(axis=0)
    return {
        "category_id": category_id,
        "bbox": [*low.tolist(), *(high - low).tolist()],
        "area": float(sum(map(_area_of, polygons))),
        "iscrowd": 0,
        "segmentation": [polygon.ravel().tolist() for polygon in polygons],
    }


def _area_of(polygon: Points) -> float:
    """Return the area of a polygon in square pixels, by the shoelace formula."""
    # Use coordinates relative to the first point, so that the products stay small and exact.
    x, y = (polygon - polygon[0]).T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)

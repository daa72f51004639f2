"""Run lengths of masks, and their COCO RLE strings by pycocotools."""

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

ROWS = [
    [],
    [[7]],
    [[0, 5]],
    [[1, 2, 3], [0], [4, 4, 4, 4, 4, 4]],
    [[0, 15, 16, 31, 32, 511, 512, 1023, 1024, 16383, 16384, 1, 524287, 2, 524288, 1]],
    [[2**31 - 1], [0, 2**31 - 1], [0, 0, 0, 2**30, 0, 0, 1]],
    [[800 * 1333]] * 5,
]


def pycocotools_strings(rows: list[list[int]]) -> list[bytes]:
    objects = [{"size": [sum(row), 1], "counts": row} for row in rows]
    return [coco_mask.frPyObjects(o, *o["size"])["counts"] for o in objects]


def padded(rows: list[list[int]], spare: int = 3) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pad rows to one length, with at least `spare` arbitrary numbers each.

    Return the padded rows of run lengths, and the number of runs in each row.
    """
    longest = max((len(row) for row in rows), default=0)
    counts = np.full((len(rows), longest + spare), 123456, np.int32)
    for row, count in zip(rows, counts, strict=True):
        count[: len(row)] = row
    return counts, np.array([len(row) for row in rows], np.int32)

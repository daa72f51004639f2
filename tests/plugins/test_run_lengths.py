import numpy as np
import pytest
from pycocotools import mask as coco_mask

from maskrcnn_trt.plugins.run_lengths import coco_strings


def strings_of_pycocotools(rows: list[list[int]]) -> list[bytes]:
    objects = [{"size": [sum(row), 1], "counts": row} for row in rows]
    return [coco_mask.frPyObjects(o, *o["size"])["counts"] for o in objects]


def padded(rows: list[list[int]], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with rubbish where no run is."""
    counts = np.full((len(rows), capacity), 123456, np.int32)
    for row, count in zip(rows, counts, strict=True):
        count[: len(row)] = row
    return counts, np.array([len(row) for row in rows], np.int32)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[7]],
        [[0, 5]],
        [[1, 2, 3], [0], [4, 4, 4, 4, 4, 4]],
        [[0, 15, 16, 31, 32, 511, 512, 1023, 1024, 16383, 16384, 1, 524287, 2, 524288, 1]],
        [[2**31 - 1], [0, 2**31 - 1], [0, 0, 0, 2**30, 0, 0, 1]],
        [[800 * 1333]] * 5,
    ],
)
def test_strings_are_those_of_pycocotools(rows: list[list[int]]) -> None:
    capacity = max((len(row) for row in rows), default=0) + 3
    assert coco_strings(*padded(rows, capacity)) == strings_of_pycocotools(rows)


@pytest.mark.parametrize("largest", [2, 40, 10**6])
def test_random_runs(largest: int) -> None:
    rng = np.random.default_rng(largest)
    rows = [rng.integers(1, largest, rng.integers(1, 60)).tolist() for _ in range(200)]
    assert coco_strings(*padded(rows, 60)) == strings_of_pycocotools(rows)


def test_runs_that_found_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match="5 runs, but there was room for 4: raise the capacity"):
        coco_strings(np.ones((2, 4), np.int32), np.array([3, 5], np.int32))

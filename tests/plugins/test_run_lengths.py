import numpy as np
import pytest
from run_length_cases import ROWS, padded, pycocotools_strings

from maskrcnn_trt.plugins.run_lengths import coco_strings

RANDOM_ROWS = [
    [rng.integers(1, largest, rng.integers(1, 60)).tolist() for _ in range(200)]
    for largest, rng in ((n, np.random.default_rng(n)) for n in (2, 40, 10**6))
]


@pytest.mark.parametrize("rows", [*ROWS, *RANDOM_ROWS], ids=range(len(ROWS) + len(RANDOM_ROWS)))
def test_strings_equal_pycocotools(rows: list[list[int]]) -> None:
    assert coco_strings(*padded(rows)) == pycocotools_strings(rows)


def test_runs_beyond_the_capacity_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"5 runs.*room for 4"):
        coco_strings(np.ones((2, 4), np.int32), np.array([3, 5], np.int32))

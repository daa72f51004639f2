import numpy as np
import pytest
from run_length_cases import ROWS, padded, strings_of_pycocotools

from maskrcnn_trt.plugins.run_lengths import coco_strings


@pytest.mark.parametrize("rows", ROWS)
def test_strings_are_those_of_pycocotools(rows: list[list[int]]) -> None:
    assert coco_strings(*padded(rows)) == strings_of_pycocotools(rows)


@pytest.mark.parametrize("largest", [2, 40, 10**6])
def test_random_runs(largest: int) -> None:
    rng = np.random.default_rng(largest)
    rows = [rng.integers(1, largest, rng.integers(1, 60)).tolist() for _ in range(200)]
    assert coco_strings(*padded(rows)) == strings_of_pycocotools(rows)


def test_runs_that_found_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match="5 runs, but there was room for 4: raise the capacity"):
        coco_strings(np.ones((2, 4), np.int32), np.array([3, 5], np.int32))

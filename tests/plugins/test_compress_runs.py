import numpy as np
import pytest
import torch
from run_length_cases import ROWS, padded, pycocotools_strings
from torch import Tensor

from maskrcnn_trt.plugins.compress_runs import compress_runs


def on_device(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    counts, num_runs = (torch.from_numpy(array).to(device) for array in padded(rows))
    return counts, num_runs


def strings(text: Tensor, spans: Tensor) -> list[bytes]:
    characters = text.cpu().numpy().tobytes()
    return [characters[start : start + length] for start, length in spans.tolist()]


RANDOM = np.random.default_rng(0)
LONG_ROWS = [
    [RANDOM.integers(1, 10**5, RANDOM.integers(1, most + 1)).tolist() for _ in range(20)]
    for most in (1, 127, 128, 129, 3000)
]


@pytest.mark.parametrize("rows", [*ROWS, *LONG_ROWS], ids=range(len(ROWS) + len(LONG_ROWS)))
def test_strings_equal_pycocotools(rows: list[list[int]], device: str) -> None:
    expected = pycocotools_strings(rows)
    total = sum(map(len, expected))
    text, spans = compress_runs(*on_device(rows, device), total + 5)
    assert strings(text, spans) == expected
    ends = sorted((start, start + length) for start, length in spans.tolist())
    assert [start for start, _ in ends] == [0, *(end for _, end in ends)][: len(rows)]


@pytest.mark.parametrize("capacity", [0, 10])
def test_spans_include_characters_beyond_the_capacity(capacity: int, device: str) -> None:
    rows = [[1, 2, 3], list(range(1, 60))]
    text, spans = compress_runs(*on_device(rows, device), capacity)
    expected = pycocotools_strings(rows)
    assert spans[:, 1].tolist() == list(map(len, expected))
    starts = spans[:, 0].tolist()
    for found, string, start in zip(strings(text, spans), expected, starts, strict=True):
        assert found == string[: max(0, capacity - start)]


def test_masks_with_too_many_runs_have_no_string(device: str) -> None:
    counts = torch.ones(3, 8, dtype=torch.int32, device=device)
    num_runs = torch.tensor([500, 8, 2**30], dtype=torch.int32, device=device)
    text, spans = compress_runs(counts, num_runs, 20)
    assert spans[:, 1].tolist() == [-1, 8, -1]
    assert strings(text, spans[1:2]) == pycocotools_strings([[1] * 8])


@pytest.mark.gpu
def test_wrong_arguments_are_rejected_on_a_gpu() -> None:
    counts, num_runs = on_device([[1, 2]], "cuda")
    with pytest.raises(ValueError, match="counts must be"):
        compress_runs(counts.long(), num_runs, 16)
    with pytest.raises(ValueError, match="num_runs must be"):
        compress_runs(counts, num_runs.repeat(2), 16)

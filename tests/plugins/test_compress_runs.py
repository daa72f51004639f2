import numpy as np
import pytest
import torch
from run_length_cases import ROWS, padded, pycocotools_strings
from torch import Tensor

from maskrcnn_trt.plugins.compress_runs import compress_runs


def on_device(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    counts, num_runs = (torch.from_numpy(array).to(device) for array in padded(rows))
    return counts, num_runs


def strings(text: Tensor, lengths: Tensor) -> list[bytes]:
    rows = zip(text.cpu().numpy(), lengths.tolist(), strict=True)
    return [row[:length].tobytes() for row, length in rows]


RANDOM = np.random.default_rng(0)
LONG_ROWS = [
    [RANDOM.integers(1, 10**5, RANDOM.integers(1, most + 1)).tolist() for _ in range(20)]
    for most in (1, 127, 128, 129, 3000)
]


@pytest.mark.parametrize("rows", [*ROWS, *LONG_ROWS], ids=range(len(ROWS) + len(LONG_ROWS)))
def test_strings_equal_pycocotools(rows: list[list[int]], device: str) -> None:
    capacity = 7 * max((30, *map(len, rows)))
    text, lengths = compress_runs(*on_device(rows, device), capacity)
    assert strings(text, lengths) == pycocotools_strings(rows)


def test_lengths_include_characters_beyond_the_capacity(device: str) -> None:
    rows = [[1, 2, 3], list(range(1, 60))]
    text, lengths = compress_runs(*on_device(rows, device), 10)
    expected = pycocotools_strings(rows)
    assert lengths.tolist() == list(map(len, expected))
    assert strings(text, lengths.clamp(max=10)) == [string[:10] for string in expected]


def test_excessive_num_runs_stay_in_bounds(device: str) -> None:
    counts = torch.ones(3, 8, dtype=torch.int32, device=device)
    num_runs = torch.tensor([8, 500, 2**30], dtype=torch.int32, device=device)
    _, lengths = compress_runs(counts, num_runs, 4)
    assert lengths.tolist() == [8, 8, 8]


def test_opcheck(device: str) -> None:
    arguments = (*on_device([[3, 4, 5], [1]], device), 16)
    torch.library.opcheck(compress_runs, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.gpu
def test_wrong_arguments_are_rejected_on_a_gpu() -> None:
    counts, num_runs = on_device([[1, 2]], "cuda")
    with pytest.raises(ValueError, match="counts must be"):
        compress_runs(counts.long(), num_runs, 16)
    with pytest.raises(ValueError, match="num_runs must be"):
        compress_runs(counts, num_runs.repeat(2), 16)

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from torch import Tensor

from maskrcnn_trt.plugins.compress_runs import compress_runs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def strings_of_pycocotools(rows: list[list[int]]) -> list[bytes]:
    objects = [{"size": [sum(row), 1], "counts": row} for row in rows]
    return [coco_mask.frPyObjects(o, *o["size"])["counts"] for o in objects]


def padded(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Rows with rubbish where no run is."""
    counts = np.full((len(rows), max(map(len, rows), default=0) + 3), 123456, np.int32)
    for row, count in zip(rows, counts, strict=True):
        count[: len(row)] = row
    num_runs = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return torch.from_numpy(counts).to(device), num_runs.to(device)


def strings(text: Tensor, lengths: Tensor) -> list[bytes]:
    rows = zip(text.cpu().numpy(), lengths.tolist(), strict=True)
    return [row[:length].tobytes() for row, length in rows]


@pytest.mark.parametrize("device", DEVICES)
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
def test_strings_are_those_of_pycocotools(rows: list[list[int]], device: str) -> None:
    text, lengths = compress_runs(*padded(rows, device), 200)
    assert strings(text, lengths) == strings_of_pycocotools(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("longest", [1, 127, 128, 129, 3000])
def test_random_runs(longest: int, device: str) -> None:
    rng = np.random.default_rng(longest)
    rows = [rng.integers(1, 10**5, rng.integers(1, longest + 1)).tolist() for _ in range(20)]
    text, lengths = compress_runs(*padded(rows, device), 7 * longest)
    assert strings(text, lengths) == strings_of_pycocotools(rows)


@pytest.mark.parametrize("device", DEVICES)
def test_what_finds_no_room_is_counted(device: str) -> None:
    rows = [[1, 2, 3], list(range(1, 60))]
    text, lengths = compress_runs(*padded(rows, device), 10)
    expected = strings_of_pycocotools(rows)
    assert lengths.tolist() == list(map(len, expected))
    assert strings(text, lengths.clamp(max=10)) == [string[:10] for string in expected]


@pytest.mark.parametrize("device", DEVICES)
def test_more_runs_than_there_are_stay_in_bounds(device: str) -> None:
    counts = torch.ones(3, 8, dtype=torch.int32, device=device)
    num_runs = torch.tensor([8, 500, 2**30], dtype=torch.int32, device=device)
    _, lengths = compress_runs(counts, num_runs, 4)
    assert lengths.tolist() == [8, 8, 8]


@pytest.mark.parametrize("device", DEVICES)
def test_the_operation_keeps_its_promises(device: str) -> None:
    arguments = (*padded([[3, 4, 5], [1]], device), 16)
    torch.library.opcheck(compress_runs, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.gpu
def test_wrong_arguments_are_refused_on_a_gpu() -> None:
    counts, num_runs = padded([[1, 2]], "cuda")
    with pytest.raises(ValueError, match="counts must be"):
        compress_runs(counts.long(), num_runs, 16)
    with pytest.raises(ValueError, match="num_runs must be"):
        compress_runs(counts, num_runs.repeat(2), 16)

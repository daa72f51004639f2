import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cuda_graphs import replayed
from torch import Tensor

from maskrcnn_trt.plugins.stable_top_k import stable_top_k, top_k_of_parts


def assert_is_stable_top_k(values: Tensor, k: int, device: str) -> None:
    """Compare with NumPy's stable sort, which puts NaN last in ascending order."""
    largest, indices = stable_top_k(values.to(device), k)
    keys = values.double().numpy()
    order = np.argsort(np.where(np.isnan(keys), -np.inf, -keys), axis=-1, kind="stable")
    # In descending order, NaN comes before infinity.
    first = np.argsort(~np.isnan(np.take_along_axis(keys, order, axis=-1)), axis=-1, kind="stable")
    expected = torch.from_numpy(np.take_along_axis(order, first, axis=-1)[..., :k].copy())
    assert indices.dtype == torch.int64
    assert largest.dtype == values.dtype
    assert torch.equal(indices.cpu(), expected)
    assert torch.equal(bits_of(largest.cpu()), bits_of(values.gather(-1, expected)))


def bits_of(values: Tensor) -> Tensor:
    """View values as integers, which distinguish signed zeros and compare NaN as equal."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def random_values(*shape: int, distinct: int | None = None, seed: int = 0) -> Tensor:
    """Return normal values, or few distinct values with many ties."""
    generator = np.random.default_rng(seed)
    if distinct is None:
        return torch.from_numpy(generator.normal(size=shape).astype(np.float32))
    return torch.from_numpy(generator.integers(-distinct, distinct, shape).astype(np.float32))


@pytest.mark.parametrize("distinct", [None, 3], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    ("shape", "k"),
    [((3, 50), 7), ((50,), 50), ((2, 3, 9), 20), ((4, 0), 3), ((2, 5), 0), ((0, 5), 2),
     ((2, 1023), 1000), ((2, 1025), 1000), ((2, 12600), 1000), ((1, 70000), 2000)],
)  # fmt: skip
def test_equals_stable_sort(
    shape: tuple[int, ...], k: int, distinct: int | None, device: str
) -> None:
    assert_is_stable_top_k(random_values(*shape, distinct=distinct), k, device)


@pytest.mark.parametrize("k", [1, 300, 1999, 2000])
def test_order_of_zeros_infinities_and_nan(k: int, device: str) -> None:
    values = random_values(2, 2000)
    odd = (-0.0, 0.0, math.inf, -math.inf, math.nan, -math.nan)
    for start, value in enumerate(odd):
        values[:, start :: 7 + start] = value
    assert_is_stable_top_k(values, k, device)


@pytest.mark.parametrize("value", [0.0, -math.inf, math.nan])
@pytest.mark.parametrize(("count", "k"), [(300, 100), (40000, 1000)])
def test_ties_keep_their_order(count: int, k: int, value: float, device: str) -> None:
    assert_is_stable_top_k(torch.full((2, count), value), k, device)
    # Few valid entries among padding.
    values = torch.full((2, count), -1.0)
    values[:, ::100] = random_values(2, count // 100).abs()
    assert_is_stable_top_k(values, k, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, device: str) -> None:
    assert_is_stable_top_k(random_values(2, 20000).to(dtype), 1000, device)


def test_any_memory_layout(device: str) -> None:
    wide = random_values(3, 20100, distinct=500)
    layouts = (
        lambda x: x[:, 7:],
        lambda x: x[:, 50:70],
        lambda x: x[1:2, 1:],
        lambda x: x[:1].expand(4, -1),
        lambda x: x.t()[:40],
        lambda x: x.view(3, 201, 100)[:, :, 3:90],
    )
    for layout in layouts:
        largest, indices = stable_top_k(layout(wide.to(device)), 30)
        expected = stable_top_k(layout(wide).contiguous(), 30)
        assert torch.equal(largest.cpu(), expected[0])
        assert torch.equal(indices.cpu(), expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "count", "k"),
    [(8, 201600, 1000), (8, 80000, 2000), (8, 5000, 1025), (1, 300000, 4096), (128, 16385, 1024),
     (2, 63000, 12000), (1, 300000, 16384), (2, 9000, 5000), (2, 6000, 6000), (1, 50000, 16385)],
)  # fmt: skip
def test_long_rows_on_a_gpu(rows: int, count: int, k: int) -> None:
    rising = torch.arange(count).float().expand(rows, -1)
    for values in (random_values(rows, count), random_values(rows, count, distinct=1000), rising):
        assert_is_stable_top_k(values, k, "cuda")


@pytest.mark.parametrize("k", [3, 12])
def test_opcheck(k: int, device: str) -> None:
    torch.library.opcheck(stable_top_k, (torch.rand(2, 9, device=device), k))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1000, 5000])
def test_can_be_captured(k: int) -> None:
    example, values = random_values(2, 40000), random_values(2, 40000, distinct=90, seed=1)
    _, indices = replayed(lambda held: stable_top_k(held, k), [example], [values])
    assert torch.equal(indices, stable_top_k(values, k)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("distinct", [None, 3], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    ("counts", "k"),
    [((50,), 7), ((30, 12, 3), 20), ((1, 2, 40, 1, 9), 40), ((1500, 1030, 700), 1200),
     ((5, 4, 3, 2, 1, 1), 5), ((6, 0, 2), 3), ((6, 3), 0)],
)  # fmt: skip
def test_top_k_of_parts_selects_from_each_part(
    counts: tuple[int, ...], k: int, distinct: int | None, dtype: torch.dtype, device: str
) -> None:
    values = random_values(2, sum(counts), distinct=distinct).to(dtype)
    assert_is_top_k_of_parts(values, counts, k, device)


def assert_is_top_k_of_parts(values: Tensor, counts: Sequence[int], k: int, device: str) -> None:
    """Compare with a stable sort of each part by NumPy."""
    largest, indices = top_k_of_parts(values.to(device), list(counts), k)
    assert largest.shape == indices.shape == (len(values), len(counts), k)
    for row, own_largest, own_indices in zip(values, largest.cpu(), indices.cpu(), strict=True):
        first = 0
        for part, count in enumerate(counts):
            entries = row[first : first + count].double().numpy()
            order = np.argsort(-entries, kind="stable")[:k]
            assert own_indices[part].tolist() == [*(first + order), *[-1] * (k - len(order))]
            assert own_largest[part, : len(order)].tolist() == entries[order].tolist()
            assert (own_largest[part, len(order) :] == -math.inf).all()
            first += count


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1000, 2000, 4096])
def test_top_k_of_long_parts_on_a_gpu(k: int) -> None:
    counts = (201600, 50400, 12600, 3150, 819)
    for distinct in (None, 3000):
        values = random_values(3, sum(counts), distinct=distinct)
        assert_is_top_k_of_parts(values, counts, k, "cuda")


def test_opcheck_of_parts(device: str) -> None:
    torch.library.opcheck(top_k_of_parts, (torch.rand(2, 9, device=device), [4, 3, 2], 3))

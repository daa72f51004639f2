"""`maskrcnn::stable_top_k` and `top_k_of_parts`: k largest entries of rows or of parts of rows.

A part of a row is, for example, the scores of one pyramid level.

Specification of all implementations: of equal entries, the one of lower index comes first. Zeros
of either sign are equal. NaN is larger than all numbers, and all NaN are equal. Both operations are
exported to ONNX with the standard operator TopK.
"""

# Ties are common, because of padding and saturated scores. A defined order makes detections equal
# on all devices and in ONNX Runtime, whose TopK guarantees this order. `torch.topk` does not.

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime.arguments import FLOAT_TYPES
from ..runtime.launching import launch_kernel
from .kernel import (
    CHUNK,
    MAX_K,
    MAX_PARTS,
    Part,
    longest,
    prune_kernel,
    prune_launch,
    sort_kernel,
    sort_launch,
    survivors,
)

# Minimum ratio of N to k for which `_select_by_key` is faster on a CPU than a sort.
_KEYS_PAY_OFF = 8


@torch.library.custom_op("maskrcnn::stable_top_k", mutates_args=(), device_types="cpu")
def stable_top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of the last axis in descending order, and their indices.

    Args:
        values: [..., N] floating point.
        k: number of entries to return; all N if N is smaller.

    Returns:
        values [..., min(k, N)], and indices of the same shape, int64.
    """
    few = k * _KEYS_PAY_OFF <= values.shape[-1]
    return _select_by_key(values, k) if few and values.dtype == torch.float32 else _sort(values, k)


@stable_top_k.register_fake
def _(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _empty_entries(values, min(k, values.shape[-1]))


@stable_top_k.register_kernel("cuda")
def _(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    k = min(k, values.shape[-1])
    if values.dtype not in FLOAT_TYPES or k > MAX_K:
        return _sort(values, k)
    largest, indices = _empty_entries(values, k)
    if largest.numel() > 0:
        _select(_rows(values), [Part(0, values.shape[-1])], k, largest, indices)
    return largest, indices


def top_k_of_parts_in_torch(values: Tensor, counts: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each of L parts of each row, and their indices in the row.

    This is the CPU implementation of `maskrcnn::top_k_of_parts`. Exporters trace this function.

    Args:
        values: [B, N] floating point.
        counts: [L], lengths of the parts of a row; their sum is N.
        k: number of entries to return of each part, at most the length of the longest part.

    Returns:
        values [B, L, k] in descending order, and indices of the same shape, int64. If a part has
            fewer than k entries, its values are padded with negative infinity, its indices with -1.
    """
    # Parts are padded to one length, so that one operation selects from all of them.
    padded = [
        F.pad(part, (0, max(counts) - part.shape[1]), value=-torch.inf)
        for part in torch.split(values, list(counts), dim=1)
    ]
    largest, indices = stable_top_k(torch.stack(padded, dim=1), k)
    among_all = [
        torch.where(own < part.length, own + part.first, -1)
        for own, part in zip(indices.unbind(dim=1), _parts(counts), strict=True)
    ]
    return largest, torch.stack(among_all, dim=1)


top_k_of_parts = torch.library.custom_op(
    "maskrcnn::top_k_of_parts", top_k_of_parts_in_torch, mutates_args=(), device_types="cpu"
)


@top_k_of_parts.register_fake
def _(values: Tensor, counts: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    return _empty_entries(values[:, None].expand(-1, len(counts), -1), k)


@top_k_of_parts.register_kernel("cuda")
def _(values: Tensor, counts: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    parts = _parts(counts)
    supported = values.dtype in FLOAT_TYPES and k <= MAX_K and len(parts) <= MAX_PARTS
    if not supported or min(counts) == 0:
        return top_k_of_parts_in_torch(values, counts, k)
    largest, indices = _empty_entries(values[:, None].expand(-1, len(parts), -1), k)
    if largest.numel() > 0:
        _select(_rows(values), parts, k, largest, indices)
    return largest, indices


def _parts(counts: Sequence[int]) -> list[Part]:
    firsts = accumulate(counts[:-1], initial=0)
    return [Part(first, count) for first, count in zip(firsts, counts, strict=True)]


def _rows(values: Tensor) -> Tensor:
    """Reshape [..., N] to R rows [R, N], each contiguous; the row stride may exceed N."""
    rows = values.reshape(-1, values.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _select(
    values: Tensor, parts: Sequence[Part], k: int, largest: Tensor, indices: Tensor
) -> None:
    """Write the k largest entries of each part of each row of `values` [R, N] to `largest`.

    Their indices in the row are written to `indices`, int64. Both outputs are [R, L, k] for L
    parts; `largest` has the dtype of `values`.
    """
    value_type, shape = FLOAT_TYPES[values.dtype], (len(values), values.stride(0))
    candidates = values.new_empty(0, dtype=torch.int64)
    while longest(parts) > CHUNK:
        left = survivors(longest(parts), k)
        kept = values.new_empty(len(values), len(parts), left, dtype=torch.int64)
        launch = prune_launch(*shape, parts, k)
        launch_kernel(prune_kernel(value_type, parts), launch, [values, candidates], [kept])
        candidates = kept
        parts = [Part(part.first, survivors(part.length, k)) for part in parts]
    outputs = [largest, indices]
    launch = sort_launch(*shape, parts, k)
    launch_kernel(sort_kernel(value_type, parts), launch, [values, candidates], outputs)


def _sort(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ordered, indices = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :k].contiguous(), indices[..., :k].contiguous()


def _select_by_key(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest float32 values of the last axis in stable order, and their indices.

    Each value gets an int64 key, and the k largest keys are selected. A larger value has a larger
    key. Of equal values, the one of lower index has the larger key.
    """
    # As integers, the bits of float32 numbers have the order of the numbers if all bits but the
    # sign are inverted in negative numbers.
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    ordered = torch.where(values.isnan(), 0x7FFFFFFF, bits ^ (bits >> 31 & 0x7FFFFFFF))
    last = values.shape[-1] - 1
    keys = (ordered.long() << 32) + torch.arange(last, -1, -1, device=values.device)
    indices = last - (keys.topk(k).values & 0xFFFFFFFF)
    return values.gather(-1, indices), indices


def _empty_entries(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*values.shape[:-1], k)
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.int64)

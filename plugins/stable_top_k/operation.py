"""`maskrcnn::stable_top_k`: top k with ties broken by the lower index.

Contract of all implementations: equal entries are ordered by index. Zeros of either sign are equal.
NaN is larger than all numbers, and all NaN are equal. In ONNX, the operation is the standard TopK.
"""

# Ties are common, because of padding and saturated scores. A defined order makes detections equal
# on all devices and in ONNX Runtime, whose TopK guarantees this order. `torch.topk` does not.

import torch
from torch import Tensor

from ..runtime.launching import launch_kernel
from .kernel import CHUNK, MAX_K, prune_kernel, prune_launch, sort_kernel, sort_launch, survivors

_VALUE_TYPES = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@torch.library.custom_op("maskrcnn::stable_top_k", mutates_args=(), device_types="cpu")
def stable_top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of the last axis in descending order, and their indices.

    Args:
        values: [..., N] floating point.
        k: number of entries to return; all N if N is smaller.

    Returns:
        values [..., min(k, N)], and indices of the same shape, int64.
    """
    return _sort(values, k)


@stable_top_k.register_fake
def _(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _empty_entries(values, min(k, values.shape[-1]))


@stable_top_k.register_kernel("cuda")
def _(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    k = min(k, values.shape[-1])
    if values.dtype not in _VALUE_TYPES or k > MAX_K:
        return _sort(values, k)
    largest, indices = _empty_entries(values, k)
    if largest.numel() == 0:
        return largest, indices
    values = _rows(values)
    candidates, count = _prune(values, k)
    launch_kernel(
        sort_kernel(_VALUE_TYPES[values.dtype], count),
        sort_launch(len(values), values.stride(0), count, k),
        [values, candidates],
        [largest, indices],
    )
    return largest, indices


def _rows(values: Tensor) -> Tensor:
    """Reshape [..., N] to R rows [R, N], each contiguous; the row stride may exceed N."""
    rows = values.reshape(-1, values.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _prune(values: Tensor, k: int) -> tuple[Tensor, int]:
    """Select up to `CHUNK` candidates for the k largest entries of each of R rows [R, N].

    Returns:
        ascending indices of M candidates per row, [R, M] int32, or an empty tensor if all entries
        are candidates; and M.
    """
    rows, length = values.shape
    candidates, count = values.new_empty(0, dtype=torch.int32), length
    while count > CHUNK:
        left = survivors(count, k)
        kept = values.new_empty(rows, left, dtype=torch.int32)
        launch_kernel(
            prune_kernel(_VALUE_TYPES[values.dtype], count),
            prune_launch(rows, values.stride(0), count, k),
            [values, candidates],
            [kept],
        )
        candidates, count = kept, left
    return candidates, count


def _sort(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ordered, indices = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :k].contiguous(), indices[..., :k].contiguous()


def _empty_entries(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*values.shape[:-1], k)
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.int64)

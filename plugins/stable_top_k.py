"""`maskrcnn::stable_top_k`: the largest entries, among equals the lower index first.

The order of equals makes detections the same on every device and in ONNX Runtime, whose TopK
promises it while `torch.topk` does not. Padding and saturated scores make equals common. Zeros of
either sign are equal, and so are values that are no numbers, which count as the largest. In ONNX
the operation is the standard TopK.
"""

import torch
from torch import Tensor

from .kernels.stable_top_k import (
    CHUNK,
    MAX_K,
    prune_kernel,
    prune_launch,
    sort_kernel,
    sort_launch,
    survivors,
)
from .launching import launch_kernel

_VALUE_TYPES = {
    torch.float32: "float",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@torch.library.custom_op("maskrcnn::stable_top_k", mutates_args=(), device_types="cpu")
def stable_top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis in descending order, and their indices.

    Args:
        values: [..., N] floating point.
        k: at most N; all N where larger.

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
    """[..., N] to [R, N]; rows may lie apart, as those of a slice do, but not be torn."""
    rows = values.reshape(-1, values.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _prune(values: Tensor, k: int) -> tuple[Tensor, int]:
    """Reduce rows to what one block takes.

    Args:
        values: [R, N], each row in one piece.
        k: entries that are wanted of each row.

    Returns:
        ascending indices into each row [R, M] int32, or none for all; and their number M.
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

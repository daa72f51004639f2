"""`maskrcnn::stable_top_k`: the largest entries, among equals the lower index first.

The order of equals makes detections the same on every device and in ONNX Runtime, whose TopK
promises it while `torch.topk` does not. Padding and saturated scores make equals common. In ONNX
the operation is the standard TopK.
"""

import torch
from torch import Tensor


@torch.library.custom_op("maskrcnn::stable_top_k", mutates_args=())
def stable_top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis in descending order, and their indices.

    Args:
        values: [..., N] floating point.
        k: at most N; all N where larger.

    Returns:
        values [..., min(k, N)], and indices of the same shape, int64.
    """
    ordered, indices = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :k].contiguous(), indices[..., :k].contiguous()


@stable_top_k.register_fake
def _(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*values.shape[:-1], min(k, values.shape[-1]))
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.int64)

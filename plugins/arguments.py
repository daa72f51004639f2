"""Tensors as kernels read them."""

import torch
from torch import Tensor

_ALIGNMENT = 16


def check_argument(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """See that a tensor is one that a kernel can read.

    Args:
        name: what an error calls it.
        tensor: what was given.
        dtype: the one that the kernel reads.
        shape: the one that the kernel reads; -1 stands for any size.

    Raises:
        ValueError: the tensor has another dtype or shape.
    """
    fits = len(shape) == tensor.dim() and all(
        wanted in (-1, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        sizes = ", ".join("*" if size < 0 else str(size) for size in shape)
        raise ValueError(
            f"{name} must be {dtype} of shape [{sizes}], not {tensor.dtype} {list(tensor.shape)}"
        )


def kernel_argument(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """The tensor, contiguous and aligned to the widest load: a copy where it is not.

    Arguments and errors are those of `check_argument`.
    """
    check_argument(name, tensor, dtype, shape)
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()

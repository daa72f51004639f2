"""Validation of tensors passed to kernels."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

# Names of C++ types in kernels, by dtype of the tensor.
HALF_TYPES: Mapping[torch.dtype, Literal["float16", "bfloat16"]] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
FLOAT_TYPES: Mapping[torch.dtype, str] = {**HALF_TYPES, torch.float32: "float"}

# Alignment of tensors in bytes. Kernels load up to 16 bytes at once, which must be aligned.
_ALIGNMENT = 16


def check_argument(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Check dtype and shape of a tensor.

    Args:
        name: name of the argument in error messages.
        tensor: the tensor to check.
        dtype: expected dtype.
        shape: expected shape; -1 allows any size.

    Raises:
        ValueError: the tensor has another dtype or shape.
    """
    sides = tensor.shape
    # Comparing the whole shape is faster.
    fits = sides == shape or (
        len(shape) == len(sides)
        and all(expected in (-1, size) for expected, size in zip(shape, sides, strict=True))
    )
    if tensor.dtype != dtype or not fits:
        sizes = ", ".join("*" if size < 0 else str(size) for size in shape)
        raise ValueError(
            f"{name} must be {dtype} of shape [{sizes}], not {tensor.dtype} {list(tensor.shape)}"
        )


def kernel_argument(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Check dtype and shape of a tensor, and make it contiguous and 16-byte aligned.

    If the tensor is contiguous and aligned already, return it, otherwise a copy.

    Arguments and errors are those of `check_argument`.
    """
    check_argument(name, tensor, dtype, shape)
    return aligned(tensor)


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor if it is contiguous and 16-byte aligned, otherwise a copy that is."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()

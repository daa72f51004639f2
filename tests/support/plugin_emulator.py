"""Execution of a plugin's kernel as by TensorRT: its PTX, loaded and launched by CUDA's driver."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver
from plugin_builder import PluginKernel
from torch import Tensor

# Bytes before and after a tensor.
_GUARD = 4096
# NaN in floating-point tensors, -1 in int32.
_POISON = 0xFF


class GuardedTensor:
    """Poisoned tensor between two guard zones, which kernels must leave alone."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: str, guard: int = _GUARD
    ) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._memory = torch.empty(guard + size + guard, dtype=torch.uint8, device=device)
        content = self._memory[guard : guard + size]
        self._guards = self._memory[:guard], self._memory[guard + size :]
        self.tensor = content.view(dtype).view(*shape)
        self.poison()

    def poison(self) -> None:
        self._memory.fill_(_POISON)

    def check(self) -> None:
        """Check that the guard zones are unchanged."""
        assert all((guard == _POISON).all() for guard in self._guards), "written out of bounds"


def guarded(tensor: Tensor, device: str, *, channels_last: bool, guard: int) -> GuardedTensor:
    """Copy a tensor; `channels_last` maps [B, C, H, W] are in TensorRT's format HWC8.

    C must be a multiple of eight, which needs no padding.
    """
    copied = tensor.movedim(1, -1) if channels_last else tensor
    held = GuardedTensor(copied.shape, copied.dtype, device, guard)
    held.tensor.copy_(copied)
    return held


def packed_arguments(
    kernel: PluginKernel, inputs: Sequence[int], scalars: Sequence[int], output: int
) -> list[Any]:
    """Return a kernel's arguments as C values: addresses of inputs, scalars, address of the output.

    TensorRT documents this order.
    """
    packed = [kind(n) for kind, n in zip(kernel.scalar_types, scalars, strict=True)]
    assert [value.value for value in packed] == list(scalars), "a scalar exceeds its type"
    return [*map(ctypes.c_void_p, inputs), *packed, ctypes.c_void_p(output)]


class LoadedKernel:
    """Kernel of a plugin on the GPU, whose context must be current."""

    def __init__(self, kernel: PluginKernel) -> None:
        """Load the PTX."""
        self._kernel = kernel
        self._library = _checked(driver.cuLibraryLoadData(kernel.ptx + b"\0", [], [], 0, [], [], 0))
        self._handle = _checked(driver.cuLibraryGetKernel(self._library, kernel.entry.encode()))
        _checked(driver.cuKernelGetFunction(self._handle))  # load it before graphs are captured

    def parameter_sizes(self) -> list[int]:
        """Return the size of each parameter in bytes, as the driver reads it from the PTX."""
        sizes = []
        while True:
            status, _offset, size = driver.cuKernelGetParamInfo(self._handle, len(sizes))
            if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                return sizes
            _checked((status,))
            sizes.append(int(size))

    def launch(
        self,
        inputs: Sequence[GuardedTensor],
        shapes: Sequence[tuple[int, ...]],
        output: GuardedTensor,
        stream: int,
    ) -> None:
        """Queue the kernel.

        Args:
            inputs: inputs in the format of the kernel.
            shapes: shapes of the inputs as TensorRT's network has them, whatever their format.
            output: the output.
            stream: handle of the CUDA stream.
        """
        grid, block, scalars = self._kernel.launch(shapes)
        addresses = [held.tensor.data_ptr() for held in inputs]
        packed = packed_arguments(self._kernel, addresses, scalars, output.tensor.data_ptr())
        pointers = (ctypes.c_void_p * len(packed))(*map(ctypes.addressof, packed))
        function = driver.CUfunction(int(self._handle))
        _checked(
            driver.cuLaunchKernel(function, *grid, *block, 0, stream, ctypes.addressof(pointers), 0)
        )

    def close(self) -> None:
        """Unload the PTX."""
        _checked(driver.cuLibraryUnload(self._library))


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    assert status == driver.CUresult.CUDA_SUCCESS, driver.cuGetErrorString(status)[1].decode()
    return values[0] if values else None

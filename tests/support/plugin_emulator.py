"""Execution of a plugin's kernel as TensorRT does it: CUDA's driver loads and launches its PTX."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from cuda.bindings import driver
from plugin_builder import PluginKernel, Shape, builder_of_plugin, evaluated
from tensorrt_stubs import load_tensorrt
from torch import Tensor

from maskrcnn_trt.plugins.tensorrt.plugins import register_plugins

# Size in bytes of each of the two guard zones, before and after a tensor.
_GUARD = 4096
# Byte that fills guard zones and unwritten outputs. It reads as NaN, and as -1 in int32.
_POISON = 0xFF


class CapturedPlugin(NamedTuple):
    """Kernel of a plugin, and dtype and symbolic shape of its output.

    For RoIAlign, also the memory formats of feature maps and pooled features.
    """

    kernel: PluginKernel
    dtype: torch.dtype
    sizes: tuple[Any, ...]
    map_format: str
    pooled_format: str


def captured_plugin(
    name: str,
    attributes: dict[str, Any],
    inputs: Sequence[Tensor],
    map_format: str,
    pooled_format: str,
    architecture: int,
) -> CapturedPlugin:
    """Return a plugin's kernel for dynamic batch sizes, numbers of RoIs and sizes of feature maps.

    Args:
        name: name of the plugin.
        attributes: its attributes.
        inputs: example inputs, which determine the types and all other sizes.
        map_format: `LINEAR`, `HWC` or `HWC8`, format of feature maps. Used for RoIAlign only.
        pooled_format: format of pooled features. Used for RoIAlign only.
        architecture: compute capability times ten.
    """
    trt = load_tensorrt()
    register_plugins(architecture)
    types = {
        torch.float32: trt.float32,
        torch.float16: trt.float16,
        torch.bfloat16: trt.bfloat16,
        torch.int64: trt.int64,
        torch.int32: trt.int32,
    }
    batch = len(inputs[0])
    shapes: list[Shape] = [
        (-1 if len(tensor) == batch else len(tensor), *tensor.shape[1:]) for tensor in inputs
    ]
    formats = ["LINEAR"] * (len(inputs) + 1)
    if not name.endswith("RoIAlign"):
        map_format = pooled_format = "LINEAR"
    else:
        shapes = [*((-1, tensor.shape[1], -1, -1) for tensor in inputs[:-1]), (-1, -1, 4)]
        formats = [map_format] * (len(inputs) - 1) + ["LINEAR", pooled_format]
    with pytest.MonkeyPatch.context() as patch:
        builder = builder_of_plugin(trt, patch, name, attributes)
        input_types = [types[tensor.dtype] for tensor in inputs]
        output_type, sizes = builder.output(input_types, shapes)
        io_types, io_shapes = [*input_types, output_type], [*shapes, (-1,) * len(sizes)]
        assert (tuple(io_types), tuple(formats)) in builder.combinations(io_types, io_shapes)
        kernel = builder.kernel(io_types, io_shapes, formats)
    (dtype,) = (dtype for dtype, type_ in types.items() if type_ == output_type)
    return CapturedPlugin(kernel, dtype, sizes, map_format, pooled_format)


class GuardedTensor:
    """Tensor between two guard zones that kernels must not change.

    Initially, all bytes of the tensor and of the guard zones are `_POISON`.
    """

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


def guarded(
    tensor: Tensor, device: str, *, channels_last: bool, guard: int = _GUARD
) -> GuardedTensor:
    """Copy a tensor to a device, between guard zones.

    `channels_last`: convert feature maps [B, C, H, W] to TensorRT's format HWC or HWC8. For HWC8, C
    must be a multiple of eight, because no channels are added as padding.
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
    """Kernel of a plugin, loaded onto the GPU. The GPU's context must be current."""

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
        shapes: Sequence[Shape],
        output: GuardedTensor,
        stream: int,
    ) -> None:
        """Queue the kernel in a stream.

        Args:
            inputs: inputs in the format of the kernel.
            shapes: shapes of the inputs in TensorRT's network: [B, C, H, W] for maps of any format.
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


def channels_last(shape: Shape) -> Shape:
    """Move the channels of [N, C, H, W] to the end."""
    return shape[0], *shape[2:], shape[1]


def executed(plugin: CapturedPlugin, kernel: LoadedKernel, inputs: Sequence[Tensor]) -> Tensor:
    """Run a kernel once, check that it writes nothing out of bounds, and return its GPU output."""
    shapes = [tuple(tensor.shape) for tensor in inputs]
    is_last, output_is_last = plugin.map_format != "LINEAR", plugin.pooled_format != "LINEAR"
    held = [
        guarded(tensor, "cuda", channels_last=is_last and tensor.dim() == 4) for tensor in inputs
    ]
    sizes = evaluated(plugin.sizes, shapes)
    memory = channels_last(sizes) if output_is_last else sizes
    output = GuardedTensor(memory, plugin.dtype, "cuda")
    kernel.launch(held, shapes, output, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for tensor in (*held, output):
        tensor.check()
    return output.tensor.movedim(-1, 1) if output_is_last else output.tensor


def own_architecture() -> int:
    """Return the GPU's compute capability times ten, and make its context current."""
    torch.cuda.synchronize()
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    assert status == driver.CUresult.CUDA_SUCCESS, driver.cuGetErrorString(status)[1].decode()
    return values[0] if values else None

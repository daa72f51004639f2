"""Kernels launched on torch's tensors, in torch's current stream."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from .compilation import Kernel, KernelError, Launch, compiled, known_architecture


def launch_kernel(
    kernel: Kernel, launch: Launch, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Queue a kernel in the current stream of its tensors' device; an empty grid does nothing.

    The first launch on a device compiles and loads the kernel, and so cannot be captured in a CUDA
    graph; the following ones can.

    Args:
        kernel: what to run.
        launch: its grid, block and scalars.
        inputs: tensors of one device, laid out as the kernel expects.
        outputs: likewise; written.

    Raises:
        KernelError: the kernel cannot be compiled for the device, loaded, or launched.
    """
    if 0 in launch.grid:
        return
    device = outputs[0].device
    pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    values = (*pointers[: len(inputs)], *launch.scalars, *pointers[len(inputs) :])
    types = (
        *[ctypes.c_void_p] * len(inputs),
        *[ctypes.c_int] * len(launch.scalars),
        *[ctypes.c_void_p] * len(outputs),
    )
    with torch.cuda.device(device):
        function = _function(kernel, torch.cuda.get_device_capability(device))
        stream = torch.cuda.current_stream(device).cuda_stream
        _checked(
            driver.cuLaunchKernel(
                function, *launch.grid, *launch.block, 0, stream, (values, types), 0
            )
        )


@functools.cache
def _function(kernel: Kernel, capability: tuple[int, int]) -> Any:
    """The kernel, loaded: a handle that serves every device of a compute capability."""
    wanted = 10 * capability[0] + capability[1]
    architecture = known_architecture(wanted)
    code = compiled(kernel, architecture, "cubin" if architecture == wanted else "ptx")
    library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    handle = _checked(driver.cuLibraryGetKernel(library, kernel.name.encode()))
    # Loads the code now instead of at the first launch, which may be captured.
    _checked(driver.cuKernelGetFunction(handle))
    return driver.CUfunction(int(handle))


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        name = driver.cuGetErrorString(status)[1]
        raise KernelError(f"CUDA driver: {name.decode() if name else status}")
    return values[0] if values else None

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
        ValueError: the tensors are of several devices.
        KernelError: the kernel cannot be compiled for the device, loaded, or launched.
        OverflowError: a scalar is no int32.
    """
    if 0 in launch.grid:
        return
    device = _device_of(kernel, (*inputs, *outputs))
    pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    values = (*pointers[: len(inputs)], *launch.scalars, *pointers[len(inputs) :])
    types = (
        *[ctypes.c_void_p] * len(inputs),
        *[ctypes.c_int] * len(launch.scalars),
        *[ctypes.c_void_p] * len(outputs),
    )
    with torch.cuda.device(device):
        _bind_context(device.index)
        function = _function(kernel, device)
        stream = torch.cuda.current_stream(device).cuda_stream
        (status,) = driver.cuLaunchKernel(
            function, *launch.grid, *launch.block, 0, stream, (values, types), 0
        )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _error_from(status, f"{kernel.name} cannot be launched as {launch}")


def _device_of(kernel: Kernel, tensors: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{kernel.name} takes tensors of one device, not of {names}")
    return devices.pop()


def _bind_context(index: int) -> None:
    """Make the device's context the thread's own if it has none, as in a new thread.

    torch leaves that to CUDA's runtime, which does it when it is first called. The driver, which
    launches kernels, does not.
    """
    problem = f"GPU {index} cannot be used"
    if int(_checked(driver.cuCtxGetCurrent(), problem)) == 0:
        device = _checked(driver.cuDeviceGet(index), problem)
        context = _checked(driver.cuDevicePrimaryCtxRetain(device), problem)
        _checked(driver.cuCtxSetCurrent(context), problem)


@functools.cache
def _function(kernel: Kernel, device: torch.device) -> Any:
    """The kernel, compiled for the current device and loaded there."""
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(
            f"{kernel.name} cannot be loaded while a CUDA graph is captured: run once on {device} "
            "what is to be captured, then capture it"
        )
    major, minor = torch.cuda.get_device_capability(device)
    wanted = 10 * major + minor
    architecture = known_architecture(wanted)
    code = compiled(kernel, architecture, "cubin" if architecture == wanted else "ptx")
    problem = f"{kernel.name} cannot be loaded on {device}"
    library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0), problem)
    handle = _checked(driver.cuLibraryGetKernel(library, kernel.name.encode()), problem)
    # Loads the code now instead of at the first launch, which may be captured.
    _checked(driver.cuKernelGetFunction(handle), problem)
    return driver.CUfunction(int(handle))


def _checked(result: tuple[Any, ...], problem: str) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _error_from(status, problem)
    return values[0] if values else None


def _error_from(status: driver.CUresult, problem: str) -> KernelError:
    reason = driver.cuGetErrorString(status)[1]
    return KernelError(f"{problem}: {reason.decode() if reason else status}")

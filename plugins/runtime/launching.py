"""Launch of CUDA kernels on torch tensors, in torch's current stream."""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from numpy.typing import NDArray
from torch import Tensor

from .compilation import Kernel, KernelError, Launch, compile_kernel, newest_supported_architecture

_NOTHING = nullcontext()


def launch_kernel(
    kernel: Kernel, launch: Launch, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Queue a kernel in the current stream of its tensors' GPU.

    If the grid is empty, nothing is launched. The first launch of a kernel on a GPU compiles and
    loads the kernel, and cannot be captured in a CUDA graph.

    Args:
        kernel: the kernel to run.
        launch: grid, block and scalar arguments.
        inputs: tensors on one GPU, in the order and memory layout that the kernel expects.
        outputs: tensors on the same GPU, which the kernel writes.

    Raises:
        ValueError: the tensors are on several GPUs.
        KernelError: the kernel cannot be compiled, loaded or launched.
        OverflowError: a scalar exceeds int32.
    """
    if 0 in launch.grid:
        return
    device = common_device(kernel.name, (*inputs, *outputs))
    pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    values = (*pointers[: len(inputs)], *launch.scalars, *pointers[len(inputs) :])
    types = (
        *[ctypes.c_void_p] * len(inputs),
        *[ctypes.c_int] * len(launch.scalars),
        *[ctypes.c_void_p] * len(outputs),
    )
    with on_gpu(device):
        bind_context(device.index)
        function = _function(kernel, device)
        stream = current_stream_handle(device)
        (status,) = driver.cuLaunchKernel(
            function, *launch.grid, *launch.block, kernel.shared_memory, stream, (values, types), 0
        )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _error_from(status, f"kernel {kernel.name} cannot be launched with {launch}")


def on_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes a GPU current. `device` is the GPU with its index."""
    # `torch.cuda.device` takes several microseconds, even if the GPU is current already.
    if torch.cuda.current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


def current_stream_handle(device: torch.device) -> int:
    """Return the CUDA handle of a GPU's current stream. `device` is the GPU with its index."""
    # `torch.cuda.current_stream` takes 5 to 20 us. Code that torch generates calls this function.
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def table_on_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of integers as an int64 tensor on a device, without waiting for the device."""
    return copy_to_device(np.array(rows, np.int64), device)


def copy_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device.

    On a GPU, the current stream fills the tensor asynchronously, from a pinned copy of the array.
    The caller may change the array after this call. On the CPU, the tensor shares the array's
    memory.
    """
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def shared_memory_limit(device: torch.device) -> int:
    """Return the maximum shared memory of a thread block on a GPU, in bytes."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def common_device(kernel: str, tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of all tensors of the kernel with the name `kernel`.

    Raises:
        ValueError: the tensors are on several devices.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"kernel {kernel} needs all its tensors on one device, not on {names}")
    return devices.pop()


@functools.cache
def _function(kernel: Kernel, device: torch.device) -> Any:
    """Compile a kernel for a GPU, load it onto the GPU, and return its driver handle."""
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(
            f"kernel {kernel.name} cannot be loaded while a CUDA graph is captured; before the "
            f"capture, run the same code once on {device}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    architecture = newest_supported_architecture(capability)
    code = compile_kernel(kernel, architecture, "cubin" if architecture == capability else "ptx")
    problem = f"kernel {kernel.name} cannot be loaded on {device}"
    library = checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0), problem)
    handle = checked(driver.cuLibraryGetKernel(library, kernel.name.encode()), problem)
    if kernel.shared_memory:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        number = checked(driver.cuDeviceGet(device.index), problem)
        checked(
            driver.cuKernelSetAttribute(attribute, kernel.shared_memory, handle, number), problem
        )
    # Load the code now, because the first launch may be captured.
    checked(driver.cuKernelGetFunction(handle), problem)
    return driver.CUfunction(int(handle))


def bind_context(index: int) -> None:
    """Bind a GPU's primary context to the current thread, unless the thread has a context.

    Raises:
        KernelError: there is no GPU with this index, or it cannot be used.
    """
    # In a new thread, CUDA's runtime binds the context at its first call. The driver API, which
    # launches these kernels, does not.
    problem = f"GPU {index} cannot be used"
    if int(checked(driver.cuCtxGetCurrent(), problem)) == 0:
        device = checked(driver.cuDeviceGet(index), problem)
        context = checked(driver.cuDevicePrimaryCtxRetain(device), problem)
        checked(driver.cuCtxSetCurrent(context), problem)


def checked(result: tuple[Any, ...], problem: str) -> Any:
    """Return the first value of a CUDA driver call's result `(status, *values)`.

    If there are no values, return None.

    Raises:
        KernelError: the call failed. The message begins with `problem`.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _error_from(status, problem)
    return values[0] if values else None


def _error_from(status: driver.CUresult, problem: str) -> KernelError:
    reason = driver.cuGetErrorString(status)[1]
    return KernelError(f"{problem}: {reason.decode() if reason else status}")

"""CUDA driver access through the package cuda-bindings, which installs without a compiler."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda
from numpy.typing import NDArray

from ..errors import BackendError


class CudaBindingsDriver:
    """Implementation of `GpuDriver`, the interface to CUDA's driver, for GPU 0."""

    def __init__(self) -> None:
        """Retain the GPU's primary CUDA context until the process ends. TensorRT uses it too.

        Raises:
            BackendError: no GPU is available, or CUDA's driver cannot be loaded.
        """
        try:
            _call("cuInit", 0)
        except RuntimeError as error:  # the driver's library is missing
            raise BackendError(str(error)) from None
        self._gpu = _call("cuDeviceGet", 0)
        self._context = _call("cuDevicePrimaryCtxRetain", self._gpu)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make GPU 0 current in this thread, within the `with` block."""
        _call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent")

    def gpu_name(self) -> str:
        """Return the GPU's name."""
        name: bytes = _call("cuDeviceGetName", 256, self._gpu)
        return name.partition(b"\0")[0].decode()

    def compute_capability(self) -> str:
        """Return the GPU's compute capability, such as `9.0`."""
        names = cuda.CUdevice_attribute
        major, minor = (
            _call("cuDeviceGetAttribute", attribute, self._gpu)
            for attribute in (
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return f"{major}.{minor}"

    def cuda_version(self) -> int:
        """Return the newest CUDA version that the driver supports, such as 13000 for 13.0."""
        return int(_call("cuDriverGetVersion"))

    def free_memory(self) -> int:
        """Return the free GPU memory in bytes."""
        free, _ = _call("cuMemGetInfo")
        return int(free)

    def synchronize(self) -> None:
        """Wait until the GPU has finished all queued work."""
        _call("cuCtxSynchronize")

    def new_memory(self, size: int) -> "_Memory":
        """Allocate `size` bytes of GPU memory; 1 byte if `size` is 0."""
        return _Memory(size)

    def new_pinned_memory(self, size: int) -> "_PinnedMemory":
        """Allocate `size` bytes of pinned host memory; 1 byte if `size` is 0."""
        return _PinnedMemory(size)

    def new_stream(self) -> "_Stream":
        """Create a CUDA stream."""
        return _Stream()

    def new_event(self) -> "_Event":
        """Create a CUDA event."""
        return _Event()


class _Memory:
    def __init__(self, size: int) -> None:
        self.address = int(_call("cuMemAlloc", max(size, 1)))

    def close(self) -> None:
        _call("cuMemFree", self.address)


class _PinnedMemory:
    def __init__(self, size: int) -> None:
        size = max(size, 1)
        self._address = int(_call("cuMemHostAlloc", size, 0))
        content = (ctypes.c_uint8 * size).from_address(self._address)
        self.array: NDArray[Any] = np.ctypeslib.as_array(content)

    def close(self) -> None:
        _call("cuMemFreeHost", self._address)


class _Event:
    def __init__(self) -> None:
        flags = cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.handle = int(_call("cuEventCreate", flags.value))

    def is_done(self) -> bool:
        (status,) = cuda.cuEventQuery(self.handle)
        if status == cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        _check("cuEventQuery", status)
        return True

    def close(self) -> None:
        _call("cuEventDestroy", self.handle)


class _Stream:
    def __init__(self) -> None:
        flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = int(_call("cuStreamCreate", flags.value))

    def record(self, event: _Event) -> None:
        _call("cuEventRecord", event.handle, self.handle)

    def wait(self, event: _Event) -> None:
        _call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def copy_in(self, address: int, host: NDArray[Any]) -> None:
        _call("cuMemcpyHtoDAsync", address, host.ctypes.data, host.nbytes, self.handle)

    def copy_out(self, host: NDArray[Any], address: int) -> None:
        _call("cuMemcpyDtoHAsync", host.ctypes.data, address, host.nbytes, self.handle)

    def close(self) -> None:
        _call("cuStreamDestroy", self.handle)


def _call(name: str, *arguments: Any) -> Any:
    """Call a driver function by name, and return its results: None, one value or a tuple.

    Raises:
        BackendError: the function returned an error status.
    """
    status, *values = getattr(cuda, name)(*arguments)
    _check(name, status)
    return values[0] if len(values) == 1 else tuple(values) or None


def _check(name: str, status: cuda.CUresult) -> None:
    if status != cuda.CUresult.CUDA_SUCCESS:
        reason = cuda.cuGetErrorString(status)[1]
        raise BackendError(
            f"the CUDA driver call {name} failed: {reason.decode() if reason else status}"
        )

"""`GpuDriver` implemented with the package pycuda."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pycuda.driver as cuda
from numpy.typing import NDArray

from ..errors import BackendError

# CU_STREAM_NON_BLOCKING, which pycuda does not name.
_NON_BLOCKING = 1


class PycudaDriver:
    """Implementation of `GpuDriver`, the interface to CUDA's driver, for GPU 0."""

    def __init__(self) -> None:
        """Retain the GPU's primary CUDA context until the process ends. TensorRT uses it too.

        Raises:
            BackendError: no GPU is available.
        """
        try:
            cuda.init()
            self._gpu = cuda.Device(0)
            self._context = self._gpu.retain_primary_context()
        except cuda.Error as error:
            raise BackendError(str(error)) from None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make GPU 0 current in this thread, within the `with` block."""
        self._context.push()
        try:
            yield
        finally:
            cuda.Context.pop()

    def gpu_name(self) -> str:
        """Return the GPU's name."""
        return str(self._gpu.name())

    def compute_capability(self) -> str:
        """Return the GPU's compute capability, such as `9.0`."""
        major, minor = self._gpu.compute_capability()
        return f"{major}.{minor}"

    def cuda_version(self) -> int:
        """Return the newest CUDA version that the driver supports, such as 13000 for 13.0."""
        return int(cuda.get_driver_version())

    def free_memory(self) -> int:
        """Return the free GPU memory in bytes."""
        free, _ = cuda.mem_get_info()
        return int(free)

    def synchronize(self) -> None:
        """Wait until the GPU has finished all queued work."""
        cuda.Context.synchronize()

    def new_memory(self, size: int) -> "_PycudaMemory":
        """Allocate `size` bytes of GPU memory; 1 byte if `size` is 0."""
        return _PycudaMemory(size)

    def new_pinned_memory(self, size: int) -> "_PycudaPinnedMemory":
        """Allocate `size` bytes of pinned host memory; 1 byte if `size` is 0."""
        return _PycudaPinnedMemory(size)

    def new_stream(self) -> "_PycudaStream":
        """Create a CUDA stream."""
        return _PycudaStream()

    def new_event(self) -> "_PycudaEvent":
        """Create a CUDA event."""
        return _PycudaEvent()


class _PycudaMemory:
    def __init__(self, size: int) -> None:
        self._allocation = cuda.mem_alloc(max(size, 1))
        self.address = int(self._allocation)

    def close(self) -> None:
        self._allocation.free()


class _PycudaPinnedMemory:
    def __init__(self, size: int) -> None:
        self.array: NDArray[Any] = cuda.pagelocked_empty(max(size, 1), np.uint8)

    def close(self) -> None:
        self.array.base.free()  # type: ignore[union-attr]


class _PycudaEvent:
    def __init__(self) -> None:
        self.event = cuda.Event(cuda.event_flags.DISABLE_TIMING)

    def is_done(self) -> bool:
        return bool(self.event.query())

    def close(self) -> None:
        del self.event  # the destructor releases it


class _PycudaStream:
    def __init__(self) -> None:
        self._stream = cuda.Stream(_NON_BLOCKING)
        self.handle = int(self._stream.handle)

    def record(self, event: _PycudaEvent) -> None:
        event.event.record(self._stream)

    def wait(self, event: _PycudaEvent) -> None:
        self._stream.wait_for_event(event.event)

    def copy_in(self, address: int, host: NDArray[Any]) -> None:
        cuda.memcpy_htod_async(address, host, self._stream)

    def copy_out(self, host: NDArray[Any], address: int) -> None:
        cuda.memcpy_dtoh_async(host, address, self._stream)

    def close(self) -> None:
        del self._stream

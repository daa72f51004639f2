"""Interface to CUDA's driver, for GPU 0. One implementation uses pycuda, another cuda-bindings."""

import functools
from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import NDArray

from ..errors import BackendError


class Memory(Protocol):
    """GPU memory, aligned to 256 bytes."""

    @property
    def address(self) -> int:
        """Address on the GPU."""

    def close(self) -> None:
        """Release the memory. The CUDA context must be current."""


class PinnedMemory(Protocol):
    """Page-locked host memory, from and to which the GPU copies without the CPU."""

    @property
    def array(self) -> NDArray[Any]:
        """The memory as a uint8 array. It must not be used after `close`."""

    def close(self) -> None:
        """Release the memory. The CUDA context must be current."""


class Event(Protocol):
    """CUDA event: a position in a stream."""

    def is_done(self) -> bool:
        """Return whether the GPU has finished the work queued before the event in its stream."""

    def close(self) -> None:
        """Release the event. The CUDA context must be current."""


class Stream(Protocol):
    """CUDA stream: a queue of GPU work. It does not wait for the default stream."""

    @property
    def handle(self) -> int:
        """CUDA's handle of the stream."""

    def record(self, event: Any) -> None:
        """Record an event after all work that has been queued on this stream so far."""

    def wait(self, event: Any) -> None:
        """Make this stream wait for another stream's event before it runs work queued later."""

    def copy_in(self, address: int, host: NDArray[Any]) -> None:
        """Queue a copy from pinned memory to the GPU address `address`."""

    def copy_out(self, host: NDArray[Any], address: int) -> None:
        """Queue a copy from the GPU address `address` to pinned memory."""

    def close(self) -> None:
        """Release the stream. The CUDA context must be current."""


class GpuDriver(Protocol):
    """Interface to CUDA's driver. Call methods within the context manager that `current` returns.

    Only `current` itself may be called outside of it.
    """

    def current(self) -> AbstractContextManager[None]:
        """Return a context manager that makes GPU 0 current in this thread.

        It pushes the GPU's primary CUDA context, which TensorRT uses too, and pops it at the end of
        the `with` block.
        """

    def gpu_name(self) -> str:
        """Return the GPU's name, such as `NVIDIA H100 80GB HBM3`."""

    def compute_capability(self) -> str:
        """Return the compute capability, such as `9.0`."""

    def cuda_version(self) -> int:
        """Return the newest CUDA version that the driver supports, such as 13000 for 13.0."""

    def free_memory(self) -> int:
        """Return the free GPU memory in bytes."""

    def synchronize(self) -> None:
        """Wait until the GPU has finished all queued work."""

    def new_memory(self, size: int) -> Memory:
        """Allocate `size` bytes of GPU memory; 1 byte if `size` is 0."""

    def new_pinned_memory(self, size: int) -> PinnedMemory:
        """Allocate `size` bytes of pinned host memory; 1 byte if `size` is 0."""

    def new_stream(self) -> Stream:
        """Create a stream."""

    def new_event(self) -> Event:
        """Create an event."""


@functools.cache
def load_driver() -> GpuDriver:
    """Return a `GpuDriver`, based on pycuda if it is installed, else on cuda-bindings.

    Raises:
        ModuleNotFoundError: neither pycuda nor cuda-bindings is installed.
        ImportError: pycuda cannot load CUDA's driver.
        BackendError: no GPU is available.
    """
    driver: type[GpuDriver]
    try:
        from .pycuda_driver import PycudaDriver

        driver = PycudaDriver
    except ModuleNotFoundError:
        try:
            from .cuda_bindings_driver import CudaBindingsDriver
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(str(error), name="cuda-bindings") from None
        driver = CudaBindingsDriver
    try:
        return driver()
    except BackendError as error:
        raise BackendError(
            f"no GPU responds ({error}); check nvidia-smi, or use --backend onnxruntime"
        ) from None

"""Batches on the GPU with pycuda: pinned and device memory, copies and streams."""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pycuda.driver as cuda
from numpy.typing import NDArray

from .base import TensorSpec, wait_until

# Function that queues a batch: takes the GPU address of each tensor by name, and a stream handle.
Launch = Callable[[Mapping[str, int], int], None]


@functools.cache
def _primary_context() -> Any:
    """Return the primary context of GPU 0, which TensorRT uses too. The process keeps it."""
    cuda.init()
    return cuda.Device(0).retain_primary_context()


@contextlib.contextmanager
def current_gpu() -> Iterator[None]:
    """Make GPU 0 current in this thread within the context. All use of the GPU requires that.

    Raises:
        pycuda.driver.Error: no GPU is available.
    """
    _primary_context().push()
    try:
        yield
    finally:
        cuda.Context.pop()


def compute_capability() -> str:
    """Return the compute capability of the current GPU, such as `9.0`."""
    major, minor = cuda.Context.get_device().compute_capability()
    return f"{major}.{minor}"


def free_memory() -> int:
    """Return the free memory of the current GPU in bytes."""
    free, _ = cuda.mem_get_info()
    return int(free)


def synchronize() -> None:
    """Wait for all work queued on the current GPU."""
    cuda.Context.synchronize()


class DeviceMemory:
    """Memory of the current GPU, aligned to 256 bytes. Released with the object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._allocation = cuda.mem_alloc(max(size, 1))
        self.address = int(self._allocation)


class _Buffers:
    """Pinned host memory and GPU memory of one in-flight batch, and the stream of its copies."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._pinned = {n: cuda.pagelocked_empty(size, np.uint8) for n, size in sizes.items()}
        self._device = {name: DeviceMemory(size) for name, size in sizes.items()}
        self._stream = cuda.Stream()
        self._loaded = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._computed = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._stored = cuda.Event(cuda.event_flags.DISABLE_TIMING)

    def copy_in(self, inputs: Mapping[str, NDArray[Any]], specs: Mapping[str, TensorSpec]) -> None:
        for name, array in inputs.items():
            host = self._host(name, specs[name])
            host[: len(array)] = array
            host[len(array) :] = 0
            cuda.memcpy_htod_async(self._device[name].address, host, self._stream)
        self._loaded.record(self._stream)

    def compute(self, stream: Any, launch: Launch) -> None:
        stream.wait_for_event(self._loaded)
        launch({name: memory.address for name, memory in self._device.items()}, stream.handle)
        self._computed.record(stream)

    def copy_out(self, specs: Mapping[str, TensorSpec]) -> dict[str, NDArray[Any]]:
        self._stream.wait_for_event(self._computed)
        hosts = {name: self._host(name, spec) for name, spec in specs.items()}
        for name, host in hosts.items():
            cuda.memcpy_dtoh_async(host, self._device[name].address, self._stream)
        self._stored.record(self._stream)
        wait_until(self._stored.query)
        return {name: host.copy() for name, host in hosts.items()}

    def _host(self, name: str, spec: TensorSpec) -> NDArray[Any]:
        pinned: NDArray[np.uint8] = self._pinned[name]
        return pinned[: spec.nbytes].view(spec.dtype).reshape(spec.shape)


class BatchRunner:
    """Runner of batches. Copies of one batch overlap the computation of another.

    Each in-flight batch has its own memory and copy stream. One stream computes all batches.
    """

    def __init__(self, sizes: Mapping[str, int], depth: int) -> None:
        """Allocate memory. The GPU must be current.

        Args:
            sizes: Buffer size of each tensor in bytes, by name.
            depth: Maximum number of in-flight batches. Further calls of `run` wait.
        """
        self._stream = cuda.Stream()
        self._launching = threading.Lock()
        self._free: queue.SimpleQueue[_Buffers] = queue.SimpleQueue()
        for _ in range(depth):
            self._free.put(_Buffers(sizes))

    def run(
        self, inputs: Mapping[str, NDArray[Any]], specs: Mapping[str, TensorSpec], launch: Launch
    ) -> dict[str, NDArray[Any]]:
        """Compute a batch and wait for it. Thread-safe. The GPU must be current.

        Args:
            inputs: Input arrays by name. If a spec has more rows than its array, the additional
                rows are zero.
            specs: Shape and dtype of each input and output by name.
            launch: Function that queues the computation. It is called by one thread at a time.

        Returns:
            The outputs by name.
        """
        outputs = {name: spec for name, spec in specs.items() if name not in inputs}
        buffers = self._free.get()
        try:
            buffers.copy_in(inputs, specs)
            with self._launching:
                buffers.compute(self._stream, launch)
            return buffers.copy_out(outputs)
        finally:
            self._free.put(buffers)

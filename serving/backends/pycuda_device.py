"""Batches on the GPU, through pycuda: memory on both sides, and the streams between them."""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pycuda.driver as cuda
from numpy.typing import NDArray

from .base import TensorSpec
from .waiting import wait_until

Launch = Callable[[Mapping[str, int], int], None]
"""Puts the computation of a batch on a stream: takes device addresses by tensor, and its handle."""


@functools.cache
def _primary_context() -> Any:
    """The context that CUDA's runtime uses too, and with it TensorRT; the process keeps it."""
    cuda.init()
    return cuda.Device(0).retain_primary_context()


@contextlib.contextmanager
def current_gpu() -> Iterator[None]:
    """Make the GPU current in this thread, which all that touches it requires.

    Raises:
        pycuda.driver.Error: no GPU is there.
    """
    _primary_context().push()
    try:
        yield
    finally:
        cuda.Context.pop()


def compute_capability() -> str:
    """Compute capability of the current GPU, as in `9.0`."""
    major, minor = cuda.Context.get_device().compute_capability()
    return f"{major}.{minor}"


def free_memory() -> int:
    """Bytes of the current GPU's memory that nobody holds."""
    free, _ = cuda.mem_get_info()
    return int(free)


def synchronize() -> None:
    """Wait for all that the current GPU was asked for."""
    cuda.Context.synchronize()


class DeviceMemory:
    """Memory of the current GPU, aligned to 256 bytes; released with the object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._allocation = cuda.mem_alloc(max(size, 1))
        self.address = int(self._allocation)


class _Buffers:
    """Pinned and device memory of one batch in flight, and the stream that copies between them."""

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
    """Computes batches one after another, and copies others in and out meanwhile.

    Each batch in flight has memory and a stream of its own; the computation has one stream for all.
    """

    def __init__(self, sizes: Mapping[str, int], depth: int) -> None:
        """Reserve memory; the GPU is current.

        Args:
            sizes: Most bytes of each tensor.
            depth: Batches in flight; a further one waits.
        """
        self._stream = cuda.Stream()
        self._launching = threading.Lock()
        self._free: queue.SimpleQueue[_Buffers] = queue.SimpleQueue()
        for _ in range(depth):
            self._free.put(_Buffers(sizes))

    def run(
        self, inputs: Mapping[str, NDArray[Any]], specs: Mapping[str, TensorSpec], launch: Launch
    ) -> dict[str, NDArray[Any]]:
        """Compute a batch and wait for it; any thread may call, with the GPU current.

        Args:
            inputs: Arrays by name; the rows that a tensor has beyond them are zero.
            specs: Tensors of the batch by name, inputs and outputs.
            launch: Puts the computation on a stream; called by one thread at a time.

        Returns:
            The tensors that are no inputs, by name.
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

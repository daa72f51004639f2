"""Execution of batches on the GPU, with pinned and GPU memory, asynchronous copies and streams."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeVar

from numpy.typing import NDArray

from .base import TensorSpec, wait_until
from .gpu_driver import Event, GpuDriver, Memory, PinnedMemory, Stream

_Closable = TypeVar("_Closable", Memory, PinnedMemory, Stream, Event)

# Function that queues the computation of a batch on a stream. Arguments: GPU address of each input
# and output by name, and handle of the stream.
Launch = Callable[[Mapping[str, int], int], None]


class _Buffers:
    """Pinned host and GPU memory of one in-flight batch, and a stream that copies between them."""

    def __init__(self, driver: GpuDriver, sizes: Mapping[str, int], resources: ExitStack) -> None:
        def keep(resource: _Closable) -> _Closable:
            return resources.enter_context(closing(resource))

        self._pinned = {name: keep(driver.new_pinned_memory(n)) for name, n in sizes.items()}
        self._device = {name: keep(driver.new_memory(n)) for name, n in sizes.items()}
        self._stream = keep(driver.new_stream())
        events = [keep(driver.new_event()) for _ in range(3)]
        self._loaded, self._computed, self._stored = events

    def copy_in(self, inputs: Mapping[str, NDArray[Any]], specs: Mapping[str, TensorSpec]) -> None:
        for name, array in inputs.items():
            host = self._host(name, specs[name])
            host[: len(array)] = array
            host[len(array) :] = 0
            self._stream.copy_in(self._device[name].address, host)
        self._stream.record(self._loaded)

    def compute(self, stream: Stream, launch: Launch) -> None:
        stream.wait(self._loaded)
        launch({name: memory.address for name, memory in self._device.items()}, stream.handle)
        stream.record(self._computed)

    def copy_out(self, specs: Mapping[str, TensorSpec]) -> dict[str, NDArray[Any]]:
        self._stream.wait(self._computed)
        hosts = {name: self._host(name, spec) for name, spec in specs.items()}
        for name, host in hosts.items():
            self._stream.copy_out(host, self._device[name].address)
        self._stream.record(self._stored)
        wait_until(self._stored.is_done)
        return {name: host.copy() for name, host in hosts.items()}

    def _host(self, name: str, spec: TensorSpec) -> NDArray[Any]:
        return self._pinned[name].array[: spec.nbytes].view(spec.dtype).reshape(spec.shape)


class BatchRunner:
    """Runner of batches on the GPU. It copies one batch while the GPU computes another one.

    Each in-flight batch has its own memory and copy stream. One stream computes all batches.
    """

    def __init__(self, driver: GpuDriver, sizes: Mapping[str, int], depth: int) -> None:
        """Allocate pinned and GPU memory for `depth` batches. The CUDA context must be current.

        Args:
            driver: Interface to CUDA's driver.
            sizes: Buffer size in bytes, by tensor name.
            depth: Maximum number of in-flight batches. Further calls of `run` wait.
        """
        self._driver = driver
        self._launching = threading.Lock()
        self._free: queue.SimpleQueue[_Buffers] = queue.SimpleQueue()
        # If memory runs out, the part that was allocated is released while the GPU is current.
        with ExitStack() as resources:
            self._stream = resources.enter_context(closing(driver.new_stream()))
            for _ in range(depth):
                self._free.put(_Buffers(driver, sizes, resources))
            self._resources = resources.pop_all()

    def run(
        self, inputs: Mapping[str, NDArray[Any]], specs: Mapping[str, TensorSpec], launch: Launch
    ) -> dict[str, NDArray[Any]]:
        """Compute a batch and wait for it. Thread-safe. The CUDA context must be current.

        Args:
            inputs: Input arrays by name. If the shape in `specs` has more rows than an array, the
                additional rows are zero.
            specs: Shape and dtype of each input and output by name.
            launch: Function that queues the computation. Its arguments are a mapping from tensor
                names to GPU addresses, and the handle of the stream to queue on. It is called by
                one thread at a time.

        Returns:
            The outputs by name.
        """
        outputs = {name: spec for name, spec in specs.items() if name not in inputs}
        buffers = self._free.get()
        try:
            buffers.copy_in(inputs, specs)
            with self.computing():
                buffers.compute(self._stream, launch)
            return buffers.copy_out(outputs)
        finally:
            self._free.put(buffers)

    @contextmanager
    def computing(self) -> Iterator[int]:
        """Context manager: lock the stream that computes all batches, and yield its handle."""
        with self._launching:
            yield self._stream.handle

    def close(self) -> None:
        """Release memory and streams. No batch may be in flight.

        The CUDA context must be current.
        """
        self._driver.synchronize()
        self._resources.close()

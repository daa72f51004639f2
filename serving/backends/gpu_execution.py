"""Execution of batches and CUDA graphs on GPU 0 through the CUDA driver API."""

import ctypes
import functools
import logging
import queue
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from ..errors import BackendError
from .base import TensorSpec, wait_until

# Function that queues the computation of a batch on a stream. Arguments: GPU address of each input
# and output by name, and handle of the stream.
Launch = Callable[[Mapping[str, int], int], None]

_log = logging.getLogger(__name__)

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may allocate and copy during a capture.
_THREAD_LOCAL = 1


class Memory(Protocol):
    """GPU memory, aligned to 256 bytes."""

    @property
    def address(self) -> int:
        """GPU address of the memory."""

    def close(self) -> None:
        """Release the memory. The CUDA context must be current."""


class PinnedMemory(Protocol):
    """Page-locked host memory, which the GPU reads and writes directly (DMA)."""

    @property
    def array(self) -> NDArray[Any]:
        """The pinned memory as a 1-D uint8 NumPy array. Do not use it after `close`."""

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
        """Make all work that is queued on this stream later wait until `event` is done."""

    def copy_in(self, address: int, host: NDArray[Any]) -> None:
        """Queue a copy of the pinned array `host` to the GPU address `address`."""

    def copy_out(self, host: NDArray[Any], address: int) -> None:
        """Queue a copy from the GPU address `address` into the pinned array `host`."""

    def close(self) -> None:
        """Release the stream. The CUDA context must be current."""


class GpuDriver(Protocol):
    """Interface to CUDA's driver.

    Call all methods except `current` within a `with driver.current():` block.
    """

    def current(self) -> AbstractContextManager[None]:
        """Return a context manager that makes GPU 0 current in this thread.

        It pushes the GPU's primary CUDA context, which TensorRT uses too, and pops it at the end of
        the `with` block.
        """

    def gpu_name(self) -> str:
        """Return the GPU's name, such as `NVIDIA H100 80GB HBM3`."""

    def compute_capability(self) -> str:
        """Return the GPU's compute capability, such as `9.0`."""

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
        """Create a CUDA stream."""

    def new_event(self) -> Event:
        """Create a CUDA event."""


@functools.cache
def load_driver() -> GpuDriver:
    """Return a `GpuDriver`, based on pycuda if it is installed, else on cuda-bindings.

    Raises:
        ModuleNotFoundError: neither pycuda nor cuda-bindings is installed.
        ImportError: pycuda cannot load CUDA's driver.
        BackendError: no GPU is available, or cuda-bindings cannot load CUDA's driver.
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


_Closable = TypeVar("_Closable", Memory, PinnedMemory, Stream, Event)


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
        # If memory runs out, the buffers allocated so far are released here, while the CUDA context
        # is current.
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
            inputs: Input arrays by name. The first dimension is the batch. If it is shorter than
                in `specs`, the array is padded with zeros.
            specs: Shape and dtype of each input and output by name.
            launch: Function that queues the computation. Its arguments are a mapping from tensor
                names to GPU addresses, and the handle of the stream to queue on. It is called by
                one thread at a time.

        Returns:
            New output arrays by name, with the shapes in `specs`: outputs for padding are included.
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


class LaunchGraphs:
    """Cache of CUDA graphs by key. A graph replays the GPU work that was queued for its key.

    The first `launch` with a key runs the work without a graph, because libraries load code at
    first use, and loading cannot be captured. It then captures the work without running it again.
    Further launches with this key replay the captured graph. If a capture fails, a warning is
    logged, no more graphs are captured, and keys without a graph run their work directly.
    """

    def __init__(self) -> None:
        """Load CUDA's driver library, `libcuda.so.1`, which must be installed."""
        # The driver is called through ctypes, because pycuda has no functions for CUDA graphs.
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._graphs: dict[Hashable, ctypes.c_void_p] = {}
        self._captures = True

    def launch(self, key: Hashable, stream: int, queue: Callable[[], None]) -> None:
        """Queue work on a stream: replay the graph of `key` if there is one, else call `queue`.

        Call this method from one thread at a time. The CUDA context must be current.

        Args:
            key: Key that identifies the work with all its shapes and addresses.
            stream: Handle of the stream, which must not be the default stream.
            queue: Function that queues the work on the stream.

        Raises:
            BackendError: `queue` or CUDA fails.
        """
        if key in self._graphs:
            self._call("cuGraphLaunch", self._graphs[key], ctypes.c_void_p(stream))
            return
        queue()
        if not self._captures:
            return
        try:
            self._graphs[key] = self._captured(ctypes.c_void_p(stream), queue)
        except BackendError as error:
            self._captures = False
            # As text: a log record that holds the error would keep TensorRT's objects alive.
            reason = str(error)
            _log.warning(
                "cannot capture CUDA graphs (%s); batches run without new ones, which is slower",
                reason,
            )

    def close(self) -> None:
        """Release all CUDA graphs. No graph may be in flight. The CUDA context must be current."""
        while self._graphs:
            self._call("cuGraphExecDestroy", self._graphs.popitem()[1])

    def _captured(self, stream: ctypes.c_void_p, queue: Callable[[], None]) -> ctypes.c_void_p:
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        try:
            try:
                queue()
            finally:  # a failed launch must not leave the stream in capture
                self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
            arguments = ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
            self._call("cuGraphInstantiateWithFlags", *arguments)
        finally:
            if graph:
                self._call("cuGraphDestroy", graph)
        return executable

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"status {status}"
            raise BackendError(f"the CUDA driver call {name} failed: {reason}")

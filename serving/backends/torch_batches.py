"""Execution of batches on the GPU with torch: CUDA graphs, and copies to and from the host."""

import contextlib
import functools
import queue
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.bundle.program import Program
from ...model.bundle.spec import ShapeBucket
from ...plugins.runtime.graph_capture import captured_graph
from .base import ModelOutputs, batch_sizes, wait_until


class _Capture(NamedTuple):
    """CUDA graph of one batch size, and the tensors that it writes."""

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


class GraphedProgram:
    """Torch program that runs as CUDA graphs, one per batch size.

    Each graph is captured at the first batch of its size.
    """

    def __init__(
        self,
        program: Program,
        bucket: ShapeBucket,
        dtype: torch.dtype,
        max_batch: int,
        pool: Any,
    ) -> None:
        """Allocate the input tensors that all graphs read.

        Args:
            program: Exported torch program, loaded onto a GPU.
            bucket: Height and width of the program's input images.
            dtype: Dtype of the program's input images.
            max_batch: Maximum batch size.
            pool: CUDA graph memory pool. Programs that share it must not run at the same time.
        """
        self._program = program
        self._sizes = batch_sizes(max_batch)
        self._pool = pool
        self._captures: dict[int, _Capture] = {}
        self._images = torch.zeros(max_batch, 3, *bucket, dtype=dtype, device=program.device)
        sizes = torch.tensor(bucket, device=program.device).expand(max_batch, 2)
        self._image_sizes = sizes.contiguous()

    def __call__(self, images: Tensor, image_sizes: Tensor) -> ModelOutputs[Tensor]:
        """Queue the computation of B images on torch's current stream; B is at most `max_batch`.

        Args:
            images: [B, 3, H, W] on the GPU, of any dtype, padded to the program's input size.
            image_sizes: [B, 2] int64 on the GPU, heights and widths before padding.

        Returns:
            New tensors, valid once the stream has run the queued work.
        """
        count = len(images)
        batch = next(size for size in self._sizes if size >= count)
        self._images[:count].copy_(images)
        self._image_sizes[:count].copy_(image_sizes)
        if batch not in self._captures:
            self._captures[batch] = self._capture(batch)
        graph, outputs = self._captures[batch]
        graph.replay()
        return ModelOutputs(*(output[:count].clone() for output in outputs))

    def _capture(self, batch: int) -> _Capture:
        inputs = self._images[:batch], self._image_sizes[:batch]
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            self._program.prepare(*inputs)  # not capturable, so it runs before the capture
        aside.synchronize()
        run = functools.partial(self._program, *inputs)
        return _Capture(*captured_graph(run, self._pool, self._program.device))


class BatchSlot:
    """GPU tensors of one in-flight batch, and the stream that copies from and to the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        # Inputs on the GPU, set by `copy_in`.
        self.inputs: tuple[Tensor, ...] = ()
        self._outputs: Sequence[Tensor] = ()
        self._loaded, self._computed = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stored = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy_in(self, *arrays: Tensor) -> None:
        """Queue copies of host tensors to the GPU in the slot's stream."""
        with torch.cuda.stream(self._stream):
            self.inputs = tuple(
                array.pin_memory().to(self._device, non_blocking=True) for array in arrays
            )
            self._loaded.record()

    def await_inputs(self) -> None:
        """Make torch's current stream wait for the copies that `copy_in` queued."""
        self._loaded.wait()

    def keep(self, outputs: Sequence[Tensor]) -> None:
        """Store the batch's outputs, which torch's current stream computes, for `copy_out`."""
        self._outputs = outputs
        self._computed.record()

    def copy_out(self) -> list[NDArray[Any]]:
        """Wait for the outputs that `keep` stored, and return copies of them on the host."""
        with torch.cuda.stream(self._stream):
            self._computed.wait()
            hosts = []
            for output in self._outputs:
                host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
                hosts.append(host.copy_(output, non_blocking=True))
            self._stored.record()
        wait_until(self._stored.query)
        return [host.numpy() for host in hosts]


class BatchSlots:
    """Pool of `count` slots, one per in-flight batch."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._free: queue.SimpleQueue[BatchSlot] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(BatchSlot(device))

    @contextlib.contextmanager
    def take(self) -> Iterator[BatchSlot]:
        """Context manager: wait for a free slot, yield it, and release it after the block."""
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)

"""Batches on the GPU through torch: CUDA graphs that compute them, and copies in and out."""

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.program import Program
from ...model.spec import ShapeBucket
from .base import batch_sizes
from .waiting import wait_until


class DeviceOutputs(NamedTuple):
    """Outputs of the model for B images, on the device."""

    num_detections: Tensor
    """[B] int64."""
    boxes: Tensor
    """[B, D, 4] float32, xyxy in pixels of the resized image."""
    scores: Tensor
    """[B, D] float32, descending."""
    labels: Tensor
    """[B, D] int64; 1 is the first class."""
    masks: Tensor
    """[B, D, M, M] float32 probabilities."""


class _Capture(NamedTuple):
    """A batch size's graph and what it writes into."""

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


class GraphedProgram:
    """A program replayed as CUDA graphs, each captured when a batch first needs it."""

    def __init__(
        self,
        program: Program,
        bucket: ShapeBucket,
        dtype: torch.dtype,
        max_batch: int,
        pool: Any,
    ) -> None:
        """Reserve the memory of the inputs.

        Args:
            program: on a GPU.
            bucket: height and width of its input.
            dtype: type of its images.
            max_batch: largest batch.
            pool: memory shared with other programs, of which one is replayed at a time.
        """
        self._program = program
        self._sizes = batch_sizes(max_batch)
        self._pool = pool
        self._captures: dict[int, _Capture] = {}
        self._images = torch.zeros(max_batch, 3, *bucket, dtype=dtype, device=program.device)
        sizes = torch.tensor(bucket, device=program.device).expand(max_batch, 2)
        self._image_sizes = sizes.contiguous()

    def __call__(self, images: Tensor, image_sizes: Tensor) -> DeviceOutputs:
        """Queue a batch of at most the largest size in the current stream; outputs are copies."""
        count = len(images)
        batch = next(size for size in self._sizes if size >= count)
        self._images[:count].copy_(images)
        self._image_sizes[:count].copy_(image_sizes)
        if batch not in self._captures:
            self._captures[batch] = self._capture(batch)
        graph, outputs = self._captures[batch]
        graph.replay()
        return DeviceOutputs(*(output[:count].clone() for output in outputs))

    def _capture(self, batch: int) -> _Capture:
        inputs = self._images[:batch], self._image_sizes[:batch]
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            self._program.prepare(*inputs)  # which cannot be captured
        aside.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = self._program(*inputs)
        return _Capture(graph, outputs)


class BatchSlot:
    """What a batch in flight needs: its tensors on the GPU, and a stream that copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: Sequence[Tensor] = ()
        self._loaded, self._computed = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stored = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What was copied in, on the GPU."""
        return self._inputs

    def copy_in(self, *arrays: Tensor) -> None:
        """Queue the copy of arrays of the host to the GPU."""
        with torch.cuda.stream(self._stream):
            self._inputs = tuple(
                array.pin_memory().to(self._device, non_blocking=True) for array in arrays
            )
            self._loaded.record()

    def await_inputs(self) -> None:
        """Make the current stream wait for what was copied in."""
        self._loaded.wait()

    def keep(self, outputs: Sequence[Tensor]) -> None:
        """Take what the current stream computes."""
        self._outputs = outputs
        self._computed.record()

    def copy_out(self) -> list[NDArray[Any]]:
        """Wait for the outputs, and bring them to the host."""
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
    """So many batches in flight; a further one waits."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._free: queue.SimpleQueue[BatchSlot] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(BatchSlot(device))

    @contextlib.contextmanager
    def take(self) -> Iterator[BatchSlot]:
        """A slot of one's own, until the block is left."""
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)

"""Backend for exported torch programs, which are replayed as CUDA graphs on a GPU."""

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.bundle.compiled_program import current_target, load_artifact
from ...model.bundle.manifest import Artifact, CompileTarget, Manifest, Precision
from ...model.bundle.program import Program
from ...model.bundle.spec import ShapeBucket
from ...model.resizing import Pixels
from ...plugins.runtime.graph_capture import captured_graph
from ...plugins.runtime.launching import current_stream_handle
from ..errors import BackendError
from .base import HostOutputs, ModelOutputs, batch_sizes, black_batch, check_outputs, wait_until

_log = logging.getLogger(__name__)


class TorchBackend:
    """Backend that runs one exported torch program per shape bucket (input size).

    On a GPU, each program has one CUDA graph per batch size, and the constructor limits torch to
    one CPU thread in the whole process.
    """

    name = "torch"

    def __init__(
        self, bundle: Path, manifest: Manifest, precision: Precision, max_batch: int
    ) -> None:
        """Load the bundle's exported torch programs of one precision onto the current GPU.

        If torch finds no GPU, the programs are loaded onto the CPU.

        Args:
            bundle: Folder of the bundle.
            manifest: Manifest of the bundle.
            precision: One of the manifest's precisions.
            max_batch: Maximum batch size.

        Raises:
            BundleError: the bundle has no program of this precision, a program's file is missing or
                damaged, or a program's inputs differ from those in the manifest.
            BackendError: the GPU has too little memory.
        """
        on_gpu = torch.cuda.is_available()
        self.device: Literal["cpu", "cuda"] = "cuda" if on_gpu else "cpu"
        self.concurrency: Final = 2 if on_gpu else 1
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        self._manifest = manifest
        artifacts = manifest.artifacts_for(precision, "torch")
        if on_gpu:
            _warn_if_not_compiled(artifacts, device)
        self._max_batch = max_batch
        self._dtypes = {a.bucket: getattr(torch, a.input_dtype) for a in artifacts}
        with _enough_memory(max_batch):
            self._programs = {a.bucket: load_artifact(bundle, a, device) for a in artifacts}
        if on_gpu:
            # With several CPU threads, torch's threads spin after each copy. The threads that
            # launch kernels and wait for the GPU then get no core, which cost 10 ms per batch.
            torch.set_num_threads(1)
            pool = torch.cuda.graph_pool_handle()
            self._graphed = {
                bucket: GraphedProgram(program, bucket, self._dtypes[bucket], max_batch, pool)
                for bucket, program in self._programs.items()
            }
            # Free slots. Each in-flight batch holds one slot.
            self._slots: queue.SimpleQueue[BatchSlot] = queue.SimpleQueue()
            for _ in range(self.concurrency):
                self._slots.put(BatchSlot(device))
            self._computing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._launching = threading.Lock()
            # Stream of the previous batch.
            self._latest = self._computing

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes of the exported torch programs."""
        return tuple(self._programs)

    def warm_up(self, max_batch: int) -> None:
        """Run the torch program of every input size. On a GPU, capture its CUDA graphs.

        Each program has one graph for each of `batch_sizes(max_batch)`. The method raises the same
        errors as `infer`.
        """
        for bucket in self.buckets:
            for batch in batch_sizes(max_batch) if self.device == "cuda" else [1]:
                self.infer(bucket, *black_batch(bucket, batch))

    def infer(
        self, bucket: ShapeBucket, images: Pixels, image_sizes: NDArray[np.int64]
    ) -> HostOutputs:
        """Run the model on images [B, 3, H, W] that are padded to the input size `bucket`.

        `image_sizes` [B, 2] are the images' heights and widths before padding. The method
        returns the model's outputs for the B images as NumPy arrays.

        Raises:
            BackendError: the batch is larger than the backend's `max_batch`, or memory runs out.
            BundleError: the output masks do not have the shape that the bundle's manifest states.
        """
        inputs = torch.from_numpy(images), torch.from_numpy(image_sizes)
        if self.device == "cpu":
            return ModelOutputs(*(x.numpy() for x in self.infer_on_device(bucket, *inputs)))
        slot = self._slots.get()
        try:
            slot.copy_in(*inputs)
            with torch.cuda.stream(self._computing):
                slot.await_inputs()
                outputs = self.infer_on_device(bucket, *slot.inputs)
                slot.keep(outputs)
            return ModelOutputs(*slot.copy_out())
        finally:
            self._slots.put(slot)

    def infer_on_device(
        self, bucket: ShapeBucket, images: Tensor, image_sizes: Tensor
    ) -> ModelOutputs[Tensor]:
        """Run the model on a batch that is in the memory of the backend's device. Thread-safe.

        On a GPU, the computation is queued on torch's current CUDA stream. On the CPU, it is
        complete when this method returns.

        Args:
            bucket: One of `buckets`.
            images: [B, 3, bucket.height, bucket.width] RGB in 0..255, uint8 or float32, on the
                device. They are converted to the input dtype of the exported torch program.
            image_sizes: [B, 2] int64 on the device, height and width before padding.

        Returns:
            New tensors on the device. On a GPU, they are valid once the stream has run the queued
            work.

        Raises:
            BackendError: the batch is larger than the backend's `max_batch`, or memory runs out.
            BundleError: the output masks do not have the shape that the bundle's manifest states.
        """
        if len(images) > self._max_batch:
            raise BackendError(
                f"the batch has {len(images)} images, but the backend was loaded for at most "
                f"{self._max_batch}; raise --max-batch"
            )
        with _enough_memory(self._max_batch):
            if self.device == "cuda":
                with self._launching:
                    # All graphs share their memory, so each batch must wait for the previous one.
                    if current_stream_handle(images.device) != self._latest.cuda_stream:
                        stream = torch.cuda.current_stream()
                        stream.wait_stream(self._latest)
                        self._latest = stream
                    outputs = self._graphed[bucket](images, image_sizes)
            else:
                images = images.to(self._dtypes[bucket])
                outputs = ModelOutputs(*self._programs[bucket](images, image_sizes))
        check_outputs(outputs, self._manifest)
        return outputs

    def close(self) -> None:
        """Release the exported torch programs and their memory."""
        self._programs.clear()
        if self.device == "cuda":
            torch.cuda.synchronize()
            del self._graphed, self._slots
            torch.cuda.empty_cache()


def _warn_if_not_compiled(artifacts: Sequence[Artifact], device: torch.device) -> None:
    """Log a warning for each torch program that must be compiled for the GPU `device`.

    Such a program is not compiled yet, or was compiled for another compute capability or another
    version of torch or Python.
    """
    for artifact in artifacts:
        compiled = artifact.compiled
        if compiled is None:
            _log.warning(
                "the torch program %s was exported without a GPU and is compiled now, which takes "
                "a minute; export the bundle on this machine to start faster",
                artifact.path,
            )
        elif compiled.target != (here := current_target(device)):
            _log.warning(
                "the torch program %s was compiled by %s, but this machine has %s; it is compiled "
                "again now, which takes a minute; export the bundle on this machine to start "
                "faster",
                artifact.path,
                *map(_format_target, (compiled.target, here)),
            )


def _format_target(target: CompileTarget) -> str:
    return (
        f"torch {target.torch_version} in Python {target.python_version} for compute capability "
        f"{target.compute_capability}"
    )


@contextlib.contextmanager
def _enough_memory(max_batch: int) -> Iterator[None]:
    """Context manager: convert torch's out-of-memory errors to BackendErrors with a remedy.

    The error message contains `max_batch`.

    Raises:
        BackendError: the GPU has too little free memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"the GPU has too little free memory for batches of up to {max_batch} images; lower "
            "--max-batch (--batch in `maskrcnn eval` and `maskrcnn bench`), or end other processes "
            "on the GPU"
        ) from error


class _Capture(NamedTuple):
    """CUDA graph of one batch size, and the tensors that it writes."""

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


class GraphedProgram:
    """Exported torch program that runs as CUDA graphs, one per batch size.

    Each graph is captured when the first batch of its size is queued.
    """

    def __init__(
        self,
        program: Program,
        bucket: ShapeBucket,
        dtype: torch.dtype,
        max_batch: int,
        pool: Any,
    ) -> None:
        """Allocate the input tensors that the program's CUDA graphs read.

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
    """GPU tensors of one in-flight batch, and the CUDA stream that copies them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        # Inputs on the GPU, set by `copy_in`.
        self.inputs: tuple[Tensor, ...] = ()
        self._outputs: Sequence[Tensor] = ()
        self._loaded, self._computed = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stored = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy_in(self, *arrays: Tensor) -> None:
        """Queue copies of host tensors to the GPU. Store the GPU tensors in `self.inputs`."""
        with torch.cuda.stream(self._stream):
            self.inputs = tuple(
                array.pin_memory().to(self._device, non_blocking=True) for array in arrays
            )
            self._loaded.record()

    def await_inputs(self) -> None:
        """Make torch's current stream wait for the copies that `copy_in` queued."""
        self._loaded.wait()

    def keep(self, outputs: Sequence[Tensor]) -> None:
        """Store output tensors for `copy_out`.

        The work that computes them must already be queued on torch's current stream.
        """
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

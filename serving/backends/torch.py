"""Programs of torch: on a GPU as they were compiled at export, and replayed as CUDA graphs."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.compiled_program import artifact_program, current_target
from ...model.manifest import Artifact, CompileTarget, Manifest, Precision
from ...model.spec import ShapeBucket
from ..errors import BackendError
from .base import Outputs, batch_sizes, black_batch, check_outputs
from .torch_batches import BatchSlots, DeviceOutputs, GraphedProgram

_log = logging.getLogger(__name__)


class TorchBackend:
    """One program a shape bucket; on a GPU a CUDA graph a batch size, and copies overlap.

    Beside a GPU it leaves torch one thread on the CPU, in the whole process.
    """

    name = "torch"

    def __init__(
        self, bundle: Path, manifest: Manifest, precision: Precision, max_batch: int
    ) -> None:
        """Load the bundle's programs of a precision, on the current GPU if there is one.

        Args:
            bundle: the bundle's folder.
            manifest: its manifest.
            precision: one of the manifest's.
            max_batch: largest batch that will come.

        Raises:
            BundleError: the bundle has none, or a file is missing or damaged.
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
            _warn_if_not_compiled(artifacts)
        self._max_batch = max_batch
        self._dtypes = {a.bucket: getattr(torch, a.input_dtype) for a in artifacts}
        with _enough_memory(max_batch):
            self._programs = {a.bucket: artifact_program(bundle, a, device) for a in artifacts}
        if on_gpu:
            # After each copy torch's threads on the CPU wait busily, which kept all cores from
            # those that launch and wait: 10 ms a batch.
            torch.set_num_threads(1)
            pool = torch.cuda.graph_pool_handle()
            self._graphed = {
                bucket: GraphedProgram(program, bucket, self._dtypes[bucket], max_batch, pool)
                for bucket, program in self._programs.items()
            }
            self._slots = BatchSlots(self.concurrency, device)
            self._computing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._launching = threading.Lock()

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Input sizes of the programs."""
        return tuple(self._programs)

    def warm_up(self, max_batch: int) -> None:
        """Compile and capture every bucket at each batch size that it is run at.

        Raises:
            BackendError: the GPU has too little memory.
            BundleError: what comes out does not fit the manifest.
        """
        for bucket in self.buckets:
            for batch in batch_sizes(max_batch) if self.device == "cuda" else [1]:
                check_outputs(self.infer(bucket, *black_batch(bucket, batch)), self._manifest)

    def infer(
        self, bucket: ShapeBucket, images: NDArray[np.uint8], image_sizes: NDArray[np.int64]
    ) -> Outputs:
        """Detect in a batch [B, 3, H, W] of one bucket; `image_sizes` is [B, 2].

        Raises:
            BackendError: the batch is larger than was said, or finds too little memory.
        """
        inputs = torch.from_numpy(images), torch.from_numpy(image_sizes)
        if self.device == "cpu":
            return Outputs(*(x.numpy() for x in self.infer_on_device(bucket, *inputs)))
        with self._slots.take() as slot:
            slot.copy_in(*inputs)
            with self._launching, torch.cuda.stream(self._computing):
                slot.await_inputs()
                outputs = self.infer_on_device(bucket, *slot.inputs)
                slot.keep(outputs)
            return Outputs(*slot.copy_out())

    def infer_on_device(
        self, bucket: ShapeBucket, images: Tensor, image_sizes: Tensor
    ) -> DeviceOutputs:
        """Queue the detection in a batch in the current stream; one thread at a time.

        Args:
            bucket: one of `buckets`.
            images: [B, 3, bucket.height, bucket.width] RGB on the device.
            image_sizes: [B, 2] int64 on the device, height and width before padding.

        Returns:
            New tensors, complete when the stream is.

        Raises:
            BackendError: the batch is larger than was said, or finds too little memory.
        """
        if len(images) > self._max_batch:
            raise BackendError(
                f"a batch has {len(images)} images, but the backend was loaded for at most "
                f"{self._max_batch}; raise --max-batch"
            )
        with _enough_memory(self._max_batch):
            if self.device == "cuda":
                return self._graphed[bucket](images, image_sizes)
            images = images.to(self._dtypes[bucket])
            return DeviceOutputs(*self._programs[bucket](images, image_sizes))

    def close(self) -> None:
        """Release the memory."""
        self._programs.clear()
        if self.device == "cuda":
            torch.cuda.synchronize()
            del self._graphed, self._slots
            torch.cuda.empty_cache()


def _warn_if_not_compiled(artifacts: Sequence[Artifact]) -> None:
    """Say so where nothing was compiled for this GPU by this torch."""
    for artifact in artifacts:
        compiled = artifact.compiled
        if compiled is None:
            _log.warning(
                "%s was exported without a GPU, and is compiled now, which takes a minute; export "
                "it where the GPU is, to start sooner",
                artifact.path,
            )
        elif compiled.target != (here := current_target()):
            _log.warning(
                "%s was compiled by %s, and here is %s: it is compiled anew, which takes a minute; "
                "export it here, to start sooner",
                artifact.path,
                *map(_target_in_words, (compiled.target, here)),
            )


def _target_in_words(target: CompileTarget) -> str:
    return (
        f"torch {target.torch_version} in Python {target.python_version} for compute capability "
        f"{target.compute_capability}"
    )


@contextlib.contextmanager
def _enough_memory(max_batch: int) -> Iterator[None]:
    """Say what to do where the GPU's memory does not suffice.

    Raises:
        BackendError: it did not.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"the GPU has too little memory free for batches of up to {max_batch}; lower "
            "--max-batch, or --batch where there is no server, or end what else is on the GPU"
        ) from error

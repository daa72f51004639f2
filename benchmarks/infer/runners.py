"""Runners of the engines to measure: a bundle's backend, the eager model, torchvision's model."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ...model.bundle.manifest import (
    QUANTIZED_PRECISIONS,
    BundleError,
    Precision,
    read_manifest,
)
from ...model.bundle.spec import OUTPUT_NAMES, ShapeBucket
from ...serving.backends.base import Backend, DeviceBackend
from ...serving.config import BackendName
from ..common.processes import MemoryKind

# Torch is imported only by the functions that need it. An import here would raise the peak memory
# of a process that measures ONNX Runtime.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...model.checkpoint import Checkpoint
    from ...serving.backends.onnxruntime import OnnxRuntimeBackend

# Memory that holds input images and output detections. `device`: memory of the device that
# computes the model.
DataPlace = Literal["device", "host"]
InferBaseline = Literal["torchvision", "onnxruntime"]


@dataclass(frozen=True)
class BatchRun:
    """Batch prepared for an engine: functions to run it, and location of its input and output."""

    # Name of the engine, such as `onnxruntime`.
    engine: str
    device: Literal["cpu", "cuda"]
    data: DataPlace
    # Kind of memory whose peak is reported.
    memory: MemoryKind
    # Start the batch and return its outputs, which may not be computed yet.
    enqueue: Callable[[], object]
    # Return the number of detections of each image, given the outputs of a completed batch.
    count_detections: Callable[[Any], Iterable[int]]
    # Wait for all started batches. None: `enqueue` itself waits.
    synchronize: Callable[[], object] | None = None

    def run(self) -> object:
        """Compute the batch, wait for it, and return its outputs."""
        outputs = self.enqueue()
        if self.synchronize is not None:
            self.synchronize()
        return outputs


@dataclass(frozen=True)
class EngineSpec:
    """Engine to measure: a model, its precision, and the backend or baseline that runs it."""

    # Path of a bundle (a folder) or of a checkpoint (a file).
    model: Path
    precision: Precision
    # Backend of a bundle.
    backend: BackendName = "auto"
    # Whether the checkpoint's weights run in torchvision's model instead of this project's model.
    with_torchvision: bool = False

    @property
    def name(self) -> str:
        """Name of the engine, known before the engine is loaded.

        For a bundle, it is the name of the backend, or `bundle` if the backend is `auto`. For a
        checkpoint, it is `eager` or `torchvision`.
        """
        if self.model.is_dir():
            return "bundle" if self.backend == "auto" else self.backend
        return "torchvision" if self.with_torchvision else "eager"

    def load(self, bucket: ShapeBucket, max_batch: int) -> "BundleRunner | TorchRunner":
        """Load the engine for an input size and batches of at most `max_batch` images.

        Raises:
            BundleError: the bundle cannot be read, or lacks the precision or the input size. Also
                raised for a checkpoint in int8 or fp8, because these precisions need a bundle.
            BackendError: the backend does not run on this machine, or does not support `max_batch`.
            CheckpointError: the file is not a checkpoint, or torchvision has no model of the
                checkpoint's configuration.
        """
        if self.model.is_dir():
            return BundleRunner(self.model, self.precision, self.backend, bucket, max_batch)
        if self.precision in QUANTIZED_PRECISIONS:
            raise BundleError(
                f"{self.precision} cannot be measured with a checkpoint; export a bundle with "
                f"`maskrcnn export CHECKPOINT -o BUNDLE --precision {self.precision} --calibration "
                "IMAGES`, and measure the bundle"
            )
        from ...model.weights.references import checkpoint_from_reference

        make = torchvision_from_checkpoint if self.with_torchvision else runner_from_checkpoint
        return make(checkpoint_from_reference(self.model), self.precision)


def first_bucket(path: Path) -> ShapeBucket:
    """Return the first input size of a bundle or a checkpoint.

    Raises:
        BundleError: the bundle cannot be read.
        CheckpointError: the file is not a checkpoint.
    """
    if path.is_dir():
        return read_manifest(path).artifacts[0].bucket
    from ...model.weights.references import checkpoint_from_reference

    return checkpoint_from_reference(path).buckets[0]


class BundleRunner:
    """Runner of a bundle (exported model) on one backend, for one input size."""

    def __init__(
        self,
        bundle: Path,
        precision: Precision,
        backend: BackendName,
        bucket: ShapeBucket,
        max_batch: int,
    ) -> None:
        """Load a bundle on a backend.

        Raises:
            BundleError: the bundle cannot be read, or lacks the precision or the input size.
            BackendError: the backend does not run on this machine, or does not support `max_batch`.
        """
        from ...serving.backends.loading import load_backend

        manifest = read_manifest(bundle)
        self._bucket = bucket
        self._backend = load_backend(bundle, manifest, precision, backend, max_batch)
        if bucket not in self._backend.buckets:
            sizes = ", ".join(map(str, self._backend.buckets))
            raise BundleError(f"{bundle} has no input size {bucket}; choose from {sizes}")

    def batch_runs(self, images: NDArray[np.uint8]) -> list[BatchRun]:
        """Return one or two `BatchRun`s of images [B, 3, H, W].

        On a CPU, return one `BatchRun`, with input and output in host memory. On a GPU, the last
        `BatchRun` has input and output in host memory. If the backend also supports input and
        output in GPU memory, a `BatchRun` of this kind precedes it.
        """
        backend, bucket = self._backend, self._bucket
        sizes = np.full((len(images), 2), bucket, np.int64)
        infer = functools.partial(backend.infer, bucket, images, sizes)
        runs = [_backend_run(backend, "host", infer, lambda outputs: outputs.num_detections)]
        if backend.name == "onnxruntime":
            index = OUTPUT_NAMES.index("num_detections")
            run = _backend_run(
                backend,
                "device",
                cast("OnnxRuntimeBackend", backend).bind_on_device(bucket, images, sizes),
                lambda outputs: outputs[index].numpy()[: len(images)],
            )
            runs.insert(0, run)
        if isinstance(backend, DeviceBackend):
            import torch

            infer_on_device = backend.infer_on_device
            inputs = [torch.from_numpy(array).to(backend.device) for array in (images, sizes)]
            run = _backend_run(
                backend,
                "device",
                lambda: infer_on_device(bucket, *inputs),
                lambda outputs: outputs.num_detections.tolist(),
                torch.cuda.synchronize if backend.device == "cuda" else None,
            )
            runs.insert(0, run)
        return runs[:1] if backend.device == "cpu" else runs


def _backend_run(
    backend: Backend,
    data: DataPlace,
    enqueue: Callable[[], object],
    count_detections: Callable[[Any], Iterable[int]],
    synchronize: Callable[[], object] | None = None,
) -> BatchRun:
    gpu_memory: MemoryKind = "torch" if backend.name == "torch" else "driver"
    return BatchRun(
        engine=backend.name,
        device=backend.device,
        data=data,
        memory="cpu" if backend.device == "cpu" else gpu_memory,
        enqueue=enqueue,
        count_detections=count_detections,
        synchronize=synchronize,
    )


@dataclass
class TorchRunner:
    """Runner of an eager torch module, on the GPU if there is one."""

    name: str
    model: "nn.Module"
    precision: Precision
    # Return the model's arguments, given images [B, 3, H, W] uint8 on its device.
    make_inputs: Callable[["Tensor"], tuple[Any, ...]]
    # Return the number of detections of each image, given the model's outputs.
    count_detections: Callable[[Any], Iterable[int]]

    def __post_init__(self) -> None:
        import torch

        self.device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.eval().to(self.device)

    def batch_runs(self, images: NDArray[np.uint8]) -> list[BatchRun]:
        """Return a list of one `BatchRun` of images [B, 3, H, W].

        Its input and output are in the memory of the device that runs the model.
        """
        import torch

        from ...training.trainer import AUTOCAST_DTYPES

        inputs = self.make_inputs(torch.from_numpy(images).to(self.device))
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        dtype = AUTOCAST_DTYPES.get(self.precision)

        def detect() -> object:
            with (
                torch.inference_mode(),
                torch.autocast(self.device, dtype, enabled=dtype is not None),
            ):
                return self.model(*inputs)

        on_gpu = self.device == "cuda"
        return [
            BatchRun(
                engine=self.name,
                device=self.device,
                data="device",
                memory="torch" if on_gpu else "cpu",
                enqueue=detect,
                count_detections=self.count_detections,
                synchronize=torch.cuda.synchronize if on_gpu else None,
            )
        ]


def runner_from_checkpoint(checkpoint: "Checkpoint", precision: Precision) -> TorchRunner:
    """Return a runner of a checkpoint's model in PyTorch eager mode."""
    import torch

    model = checkpoint.build_model()
    torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)

    def make_inputs(images: "Tensor") -> "tuple[Tensor, Tensor]":
        sizes = torch.tensor(images.shape[2:], device=images.device).expand(len(images), 2)
        return images, sizes.contiguous()

    return TorchRunner(
        "eager", model, precision, make_inputs, lambda outputs: outputs.num_detections.tolist()
    )


def torchvision_from_checkpoint(checkpoint: "Checkpoint", precision: Precision) -> TorchRunner:
    """Return a runner of torchvision's model with the checkpoint's weights.

    A run includes torchvision's resizing of the images and pasting of the masks.

    Raises:
        CheckpointError: torchvision has no model of the checkpoint's configuration.
    """
    from ...model.checkpoint import CheckpointError
    from ..common.torchvision_baseline import torchvision_from_config

    model = torchvision_from_config(checkpoint.model_config)
    try:
        model.load_state_dict(checkpoint.weights)
    except RuntimeError as error:
        raise CheckpointError(
            "torchvision has no model with the checkpoint's architecture; measure without --peer "
            "torchvision"
        ) from error

    def make_inputs(images: "Tensor") -> "tuple[list[Tensor]]":
        # Torchvision always resizes. These limits make it keep the images' size.
        sides = images.shape[2:]
        model.transform.min_size, model.transform.max_size = (min(sides),), max(sides)
        return (list(images.float() / 255),)

    return TorchRunner(
        "torchvision",
        model,
        precision,
        make_inputs,
        lambda outputs: [len(image["boxes"]) for image in outputs],
    )

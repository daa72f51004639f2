"""Loading and compilation of exported torch programs. The model's Python code is not needed."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from ...plugins import operations  # noqa: F401, registers the operations that programs call
from ..inductor import configure_inductor
from .manifest import Artifact, BundleError, Precision

# Additional GPU memory in bytes that a warm-up run may take while cuDNN tries algorithms.
_TRIAL_BYTES = 8 << 30


class Program:
    """Executable detection program: computes detections from images and image sizes."""

    def __init__(
        self, run: Callable[..., tuple[Tensor, ...]], precision: Precision, device: torch.device
    ) -> None:
        """Create a `Program` from a function that runs compiled or interpreted code.

        Args:
            run: function that computes the outputs from images and image sizes.
            precision: precision in which the program was exported. The programs of `fp32` and
                `tf32` are equal, but TF32 arithmetic is allowed only for `tf32`.
            device: the CPU, or a GPU with its index.
        """
        self.device = device
        self._run = run
        self._precision = precision

    @torch.inference_mode()
    def __call__(self, images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        """Return number, boxes, scores, labels and masks of the detections in each image.

        `model/bundle/spec.py` specifies these outputs. On a GPU, inputs must be contiguous.

        Args:
            images: [B, 3, H, W] in the dtype of the exported program.
            image_sizes: [B, 2] int64, height and width in pixels before padding.
        """
        with torch_math_mode(self._precision), ignore_torch_warnings():
            return self._run(images, image_sizes)

    def prepare(self, images: Tensor, image_sizes: Tensor) -> None:
        """Warm up a program on a GPU for batches of the shape of `images`.

        The arguments are those of `__call__`. The program runs once, which compiles it, loads
        kernels and selects algorithms. The outputs are discarded. During this run, the GPU memory
        limit of the process is lowered, because cuDNN may try algorithms that would need all GPU
        memory. If the model itself exceeds the lower limit, the program runs again with the
        previous limit.
        """
        # In fp32, some algorithms that cuDNN tries would take all GPU memory, including memory that
        # other processes need. Therefore the first run has a lower memory limit. If the model
        # itself exceeds this limit, run it again with the previous limit.
        allowed = torch.cuda.get_per_process_memory_fraction(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        bound = (torch.cuda.memory_reserved(self.device) + _TRIAL_BYTES) / total
        try:
            torch.cuda.set_per_process_memory_fraction(min(bound, allowed), self.device)
            self(images, image_sizes)
            return
        except torch.OutOfMemoryError:
            pass  # retry below: here, the exception still holds the tensors of the failed run
        finally:
            torch.cuda.set_per_process_memory_fraction(allowed, self.device)
        self(images, image_sizes)


def program_from_exported(
    exported: ExportedProgram, precision: Precision, device: torch.device
) -> Program:
    """Make an exported program executable.

    On a GPU, the first call with batch size 1 compiles the program for this batch size. The first
    call with a larger batch size compiles it for all batch sizes above 1. On the CPU, the program
    is interpreted.

    Args:
        exported: result of `load_exported_program` for the device.
        precision: precision in which the program was exported.
        device: the CPU, or a GPU with its index.
    """
    module = exported.module()
    if device.type != "cuda":
        return Program(module, precision, device)
    compiled = torch.compile(module, fullgraph=True, options=configure_inductor())

    def run(images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        if len(images) > 1:
            for tensor in (images, image_sizes):
                torch._dynamo.mark_dynamic(tensor, 0)
        return tuple(compiled(images, image_sizes))

    return Program(run, precision, device)


def load_exported_program(path: Path, device: torch.device) -> ExportedProgram:
    """Load an exported program onto a device.

    Raises:
        BundleError: the file is damaged, or was written by another version of torch or of this
            package.
    """
    with ignore_torch_warnings():
        try:
            program = torch.export.load(path)
        except Exception as error:  # a damaged file fails in many ways
            raise BundleError(
                f"{path} is damaged, or was written by another version of torch or maskrcnn-trt; "
                "export the bundle again"
            ) from error
        return move_to_device_pass(program, str(device))


def check_images(path: Path, exported: ExportedProgram, artifact: Artifact) -> None:
    """Check that a program's input images have the dtype and size that the manifest states.

    Args:
        path: file of the program, named in the error message.
        exported: the program.
        artifact: manifest entry of the program.

    Raises:
        BundleError: the dtype or the size differs from the manifest.
    """
    name = exported.graph_signature.user_inputs[0]
    images = next(n for n in exported.graph.nodes if n.name == name).meta["val"]
    expected = getattr(torch, artifact.input_dtype), (3, *artifact.bucket)
    if (images.dtype, tuple(images.shape[1:])) != expected:
        raise BundleError(
            f"{path} takes images of dtype {images.dtype} and shape {list(images.shape)}, but the "
            f"manifest states dtype {artifact.input_dtype} and size {artifact.bucket}; export the "
            "bundle again"
        )


@contextlib.contextmanager
def torch_math_mode(precision: Precision) -> Iterator[None]:
    """Context manager: enable cuDNN's benchmark mode, and allow TF32 only for precision "tf32".

    After the `with` block, the previous settings are restored.
    """
    tf32 = precision == "tf32"
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = tf32, tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@contextlib.contextmanager
def ignore_torch_warnings() -> Iterator[None]:
    """Context manager: suppress all Python warnings, such as those about torch's internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

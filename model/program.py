"""An exported program on a device: loaded and compiled without any code of the model."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from ..plugins import operations  # noqa: F401, registers what programs call
from .manifest import Precision

_TRIAL_BYTES = 8 << 30
"""Of a GPU, beside what is taken, for a first run and the convolutions that it tries."""


class Program:
    """Detection as `model.spec` has it."""

    def __init__(
        self, run: Callable[..., tuple[Tensor, ...]], precision: Precision, device: torch.device
    ) -> None:
        """Take what computes.

        Args:
            run: from images and their sizes to the outputs.
            precision: its artefact's; `tf32` and `fp32` are one program.
            device: a CPU, or a GPU by its index.
        """
        self.device = device
        self._run = run
        self._precision = precision

    @torch.inference_mode()
    def __call__(self, images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        """The five outputs for [B, 3, H, W] images and [B, 2] sizes, contiguous ones on a GPU."""
        with arithmetic(self._precision), quiet_torch():
            return self._run(images, image_sizes)

    def prepare(self, images: Tensor, image_sizes: Tensor) -> None:
        """Compile, load kernels and choose convolutions for batches like this one on a GPU.

        In fp32 cuDNN has convolutions to try that would take all of the GPU's memory, and with it
        what other processes need. The first run gets a part, and if the model needs more than that
        itself, a second gets what the process may have. The bound holds for all of its threads.
        """
        allowed = torch.cuda.get_per_process_memory_fraction(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        bound = (torch.cuda.memory_reserved(self.device) + _TRIAL_BYTES) / total
        try:
            torch.cuda.set_per_process_memory_fraction(min(bound, allowed), self.device)
            self(images, image_sizes)
            return
        except torch.OutOfMemoryError:
            pass  # the exception holds the tensors of the run that failed
        finally:
            torch.cuda.set_per_process_memory_fraction(allowed, self.device)
        self(images, image_sizes)


def load_program(path: Path, precision: Precision, device: torch.device) -> Program:
    """What export wrote, interpreted on a CPU and compiled on a GPU, when first called.

    What is compiled serves every batch size; a batch of one is compiled apart.

    Args:
        path: the program.
        precision: its artefact's.
        device: a CPU, or a GPU by its index.
    """
    module = exported_program(path, device).module()
    if device.type != "cuda":
        return Program(module, precision, device)
    compiled = torch.compile(module, fullgraph=True)

    def run(images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        if len(images) > 1:
            for tensor in (images, image_sizes):
                torch._dynamo.mark_dynamic(tensor, 0)
        return tuple(compiled(images, image_sizes))

    return Program(run, precision, device)


def exported_program(path: Path, device: torch.device) -> ExportedProgram:
    """What export wrote, on a device."""
    with quiet_torch():
        return move_to_device_pass(torch.export.load(path), str(device))


@contextlib.contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Let torch compute float32 products in TF32 or not, and choose convolutions by measuring."""
    tf32 = precision == "tf32"
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = tf32, tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep torch's notes on its own internals from users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

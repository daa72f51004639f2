"""An exported program on a device: loaded and compiled without any code of the model."""

import contextlib
import gzip
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

from ..plugins import operations  # noqa: F401, registers what programs call
from .manifest import Precision

_TRIAL_BYTES = 8 << 30
"""Of a GPU, beside what is taken, for a first run and the convolutions that it tries."""


class Program:
    """Detection as `model.spec` has it, compiled on a GPU and interpreted on a CPU.

    What is compiled serves every batch size; a batch of one is compiled apart.
    """

    def __init__(self, path: Path, precision: Precision, device: torch.device) -> None:
        """Load what export wrote; nothing is compiled yet.

        Args:
            path: the program.
            precision: its artefact's; `tf32` and `fp32` are one program.
            device: a CPU, or a GPU by its index.
        """
        self.device = device
        self._precision = precision
        with quiet_torch():
            program = move_to_device_pass(torch.export.load(path), str(device))
        self._run: Callable[..., tuple[Tensor, ...]] = program.module()
        if device.type == "cuda":
            self._run = torch.compile(self._run, fullgraph=True)

    @torch.inference_mode()
    def __call__(self, images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        """The five outputs for [B, 3, H, W] images and [B, 2] sizes; the first call compiles."""
        if len(images) > 1:
            for tensor in (images, image_sizes):
                torch._dynamo.mark_dynamic(tensor, 0)
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


def compile_target() -> tuple[str, str]:
    """What compiled code depends on: the version of torch, and the current GPU's capability."""
    major, minor = torch.cuda.get_device_capability()
    return torch.__version__, f"{major}.{minor}"


def write_compile_cache(
    path: Path, precision: Precision, images: torch.Size, dtype: torch.dtype, cache: Path
) -> None:
    """Compile a program for the current GPU, and write what comes of it for `load_compile_cache`.

    To be called in a process that compiles nothing else, since that would be written too.

    Args:
        path: what export wrote.
        precision: its artefact's.
        images: [2, 3, H, W], the shape of a batch of its images.
        dtype: their type.
        cache: file to write.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    program = Program(path, precision, device)
    batch = torch.zeros(images, dtype=dtype, device=device)
    sizes = torch.tensor(images[2:], device=device).repeat(len(batch), 1)
    for count in (len(batch), 1):
        program.prepare(batch[:count], sizes[:count])
    artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None, "nothing was compiled"
    with gzip.open(cache, "wb", compresslevel=3) as file:
        file.write(artifacts[0])


def load_compile_cache(path: Path) -> None:
    """Give torch what was compiled before, by the same version for the same GPU."""
    with gzip.open(path, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep torch's notes on its own internals from users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

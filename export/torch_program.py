"""From a model to a program of torch that needs no model code."""

import multiprocessing
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..model.compiled_program import current_target, write_compiled_program
from ..model.manifest import CompiledProgram, Precision, sha256_of
from ..model.mask_rcnn import MaskRCNN
from ..model.program import quiet_torch
from ..model.spec import ShapeBucket
from .errors import EngineError
from .fused_graph import fuse_convolutions

_COMPILING_AT_ONCE = 4


class _Detector(nn.Module):
    """A model whose outputs are a plain tuple, so that loading the program needs no class."""

    def __init__(self, model: MaskRCNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.model.detect(images, image_sizes))


def program_from_model(
    model: MaskRCNN, bucket: ShapeBucket, input_dtype: torch.dtype
) -> ExportedProgram:
    """Export detection for one shape bucket, with a dynamic batch.

    Args:
        model: on the CPU, in evaluation mode; `rearrange_for_gpu` has been at it.
        bucket: height and width of the input.
        input_dtype: `torch.uint8` or `torch.float32`, both in 0..255.

    Returns:
        A program of ATen and our own operations; inputs and outputs are those of `model.spec`.
    """
    # Two images, for a batch of one would be taken for a constant.
    images = torch.zeros(2, 3, *bucket, dtype=input_dtype)
    image_sizes = torch.tensor([list(bucket)] * 2)
    batch = {0: Dim("batch", min=1)}
    with torch.no_grad(), quiet_torch():
        exported = torch.export.export(
            _Detector(model), (images, image_sizes), dynamic_shapes=(batch, batch)
        )
        program: ExportedProgram = exported.run_decompositions({})
    _drop_assertions(program)
    fuse_convolutions(program)
    return program


def _drop_assertions(program: ExportedProgram) -> None:
    """Remove assertions that tensors have the types and places they had while exporting."""
    graph = program.graph_module.graph
    target = torch.ops.aten._assert_tensor_metadata.default
    for node in graph.find_nodes(op="call_function", target=target):
        graph.erase_node(node)


def write_program(program: ExportedProgram, path: Path) -> None:
    """Write a program to a file that ends in `.pt2`."""
    with quiet_torch():
        torch.export.save(program, path)


class Compilation(NamedTuple):
    """What is to be compiled."""

    path: Path
    """What `write_program` wrote."""
    precision: Precision
    """`fp32` and `tf32` are one program."""
    bucket: ShapeBucket
    """Height and width of its input."""
    input_dtype: torch.dtype
    """Type of its images."""

    @property
    def compiled(self) -> Path:
        """What it is compiled into, beside the program."""
        return self.path.with_name(f"model-{self.precision}-{self.bucket}.compiled")


def compile_programs(compilations: Sequence[Compilation]) -> list[CompiledProgram | None]:
    """Compile programs for the GPU of this machine, several at once.

    Returns:
        What was written for each, or None where no GPU is.

    Raises:
        EngineError: there is a GPU, but no compiler of C.
    """
    if not torch.cuda.is_available():
        return [None] * len(compilations)
    _check_compiler()
    processes = ProcessPoolExecutor(
        min(_COMPILING_AT_ONCE, len(os.sched_getaffinity(0))),
        multiprocessing.get_context("spawn"),
    )
    with processes:
        for each in [processes.submit(_compile, compilation) for compilation in compilations]:
            each.result()
    target = current_target()
    return [
        CompiledProgram(path=path.name, sha256=sha256_of(path), target=target)
        for path in (compilation.compiled for compilation in compilations)
    ]


def _check_compiler() -> None:
    """Refuse to compile for a GPU where Triton will not find what it looks for in the end."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise EngineError(
            "torch compiles for a GPU with a compiler of C, and there is none; install one and the "
            "headers of libc, as by `apt-get install gcc libc6-dev`, or name it in CC"
        )


def _compile(compilation: Compilation) -> None:
    path, precision, bucket, input_dtype = compilation
    shape = torch.Size((2, 3, *bucket))
    device = torch.device("cuda", torch.cuda.current_device())
    write_compiled_program(path, precision, device, shape, input_dtype, compilation.compiled)

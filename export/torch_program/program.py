"""Conversion of a model to a torch program, and its compilation for the GPU."""

import functools
import importlib
import io
import logging
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ...model.bundle.compiled_program import (
    add_kernels,
    compile_program,
    current_target,
    write_compiled_program,
)
from ...model.bundle.manifest import COMPILED_SUFFIX, CompiledProgram, Precision, sha256_of
from ...model.bundle.program import ignore_torch_warnings
from ...model.bundle.spec import ShapeBucket
from ...model.mask_rcnn import MaskRCNN
from ..errors import EngineError
from .fused_graph import fuse_blocks, fuse_convolutions, fuse_middle_convolutions

_log = logging.getLogger(__name__)

# Maximum number of parallel compilations. In each of them, two processes compile.
_MAX_COMPILATIONS = 2


class _TupleModel(nn.Module):
    """Model that returns a plain tuple. Its exported program needs no classes of this project."""

    def __init__(self, model: MaskRCNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.model.detect(images, image_sizes))


def program_from_model(
    model: MaskRCNN, bucket: ShapeBucket, input_dtype: torch.dtype
) -> ExportedProgram:
    """Export a model's inference as a torch program for one input size and any batch size.

    Args:
        model: detector on the CPU, in evaluation mode, modified by `optimize_for_gpu`.
        bucket: height and width of the input in pixels.
        input_dtype: `torch.uint8` or `torch.float32`. In both types, pixel values are 0..255.

    Returns:
        A program of ATen operations and the custom operations of `plugins`. It takes images
            [B, 3, H, W] and image sizes [B, 2], (height, width) in pixels before padding. It
            returns the outputs that the module `model/bundle/spec.py` lists.
    """
    # Use two images, because torch.export treats a batch size of one as a constant.
    images = torch.zeros(2, 3, *bucket, dtype=input_dtype)
    image_sizes = torch.tensor([list(bucket)] * 2)
    batch = {0: Dim("batch", min=1)}
    with torch.no_grad(), ignore_torch_warnings():
        exported = torch.export.export(
            _TupleModel(model), (images, image_sizes), dynamic_shapes=(batch, batch)
        )
        program: ExportedProgram = exported.run_decompositions({})
    _drop_assertions(program)
    fuse_convolutions(program)
    fuse_blocks(program)
    fuse_middle_convolutions(program)
    return program


def _drop_assertions(program: ExportedProgram) -> None:
    """Remove a torch program's assertions on the types and devices of tensors, in place."""
    graph = program.graph_module.graph
    target = torch.ops.aten._assert_tensor_metadata.default
    for node in graph.find_nodes(op="call_function", target=target):
        graph.erase_node(node)


def write_program(program: ExportedProgram, path: Path) -> None:
    """Write a torch program to a file.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    # If torch writes the file itself and the disk is full, its C++ code aborts the process.
    buffer = io.BytesIO()
    with ignore_torch_warnings():
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


class Compilation(NamedTuple):
    """Torch program to compile, with the precision, input size and input dtype of the result."""

    # File that `write_program` wrote.
    path: Path
    # `fp32` and `tf32` share a torch program, but each has its own compiled program.
    precision: Precision
    # Height and width of the input.
    bucket: ShapeBucket
    # Type of the `images` input.
    input_dtype: torch.dtype

    @property
    def compiled(self) -> Path:
        """Path of the compiled program, in the folder of the torch program."""
        return self.path.with_name(f"model-{self.precision}-{self.bucket}{COMPILED_SUFFIX}")

    @property
    def images(self) -> torch.Size:
        """Shape [2, 3, H, W] of the example batch with which the program is compiled."""
        return torch.Size((2, 3, *self.bucket))


def compile_programs(compilations: Sequence[Compilation]) -> list[CompiledProgram | None]:
    """Compile torch programs for this machine's GPU, and write each to `Compilation.compiled`.

    Returns:
        for each program, the manifest entry of the compiled program, or None if there is no GPU.

    Raises:
        EngineError: there is a GPU, but no C compiler. Or a compiling process died.
    """
    if not torch.cuda.is_available():
        return [None] * len(compilations)
    _check_compiler()
    try:
        with ThreadPoolExecutor(min(_MAX_COMPILATIONS, _cores())) as threads:
            list(threads.map(_compile_in_new_processes, compilations))
    except BrokenProcessPool:
        raise EngineError(
            "a process that compiled a torch program died, probably because memory ran out; free "
            "memory, or export fewer precisions and input sizes at a time"
        ) from None
    target = current_target(torch.device("cuda"))
    return [
        CompiledProgram(path=path.name, sha256=sha256_of(path), target=target)
        for path in (compilation.compiled for compilation in compilations)
    ]


def _check_compiler() -> None:
    """Raise `EngineError` if there is no C compiler, which torch needs to compile a program."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise EngineError(
            "torch needs a C compiler to compile for a GPU, and none was found; install a compiler "
            "and the headers of libc, such as with `apt-get install gcc libc6-dev`, or set CC to "
            "the path of a compiler"
        )


def _compile_in_new_processes(compilation: Compilation) -> None:
    # torch's compiler is not thread-safe, and `add_kernels` needs a process of its own. The process
    # for `add_kernels` imports torch while the other ones compile.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as running:
        running.submit(importlib.import_module, add_kernels.__module__)
        with ProcessPoolExecutor(min(2, _cores()), context) as compiling:
            one, many = compiling.map(functools.partial(_compile, compilation), (False, True))
        # The compiling processes have ended, so their GPU memory is free.
        running.submit(_write_with_kernels, compilation, one, many).result()


def _compile(compilation: Compilation, any_batch: bool) -> bytes:
    path, precision, _, dtype = compilation
    images = compilation.images
    return compile_program(path, precision, _gpu(), images, dtype, any_batch=any_batch)


def _write_with_kernels(compilation: Compilation, one: bytes, many: bytes) -> None:
    path, precision, _, dtype = compilation
    write_compiled_program(path, one, many, compilation.compiled)
    try:
        add_kernels(compilation.compiled, precision, _gpu(), compilation.images, dtype)
    except RuntimeError as error:  # in most cases, too little GPU memory
        _log.warning(
            "%s cannot be run (%s), so its kernels are not stored, and its first start on a "
            "machine takes longer; if other processes use the GPU, end them and export again",
            compilation.compiled.name,
            str(error).partition("\n")[0],
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())

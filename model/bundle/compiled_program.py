"""Torch programs compiled ahead of time for one GPU architecture, stored with their weights.

A compiled program needs no tracing when it is loaded, which shortens the start of a server.
"""

import io
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# torch has no public interface for ahead-of-time compilation of weights and code in one file. These
# private modules may move when torch is upgraded.
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config, standalone_compile
from torch._inductor.standalone_compile import AOTCompiledArtifact
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..atomic_files import atomic_write
from ..inductor import configure_inductor
from .kernel_files import cached_kernels, restore_kernels
from .manifest import Artifact, CompileTarget, Precision, verified_path
from .program import (
    Program,
    check_images,
    ignore_torch_warnings,
    load_exported_program,
    program_from_exported,
    torch_math_mode,
)


def current_target(device: torch.device) -> CompileTarget:
    """Return the versions of torch and Python, and the compute capability of the GPU `device`."""
    major, minor = torch.cuda.get_device_capability(device)
    return CompileTarget(
        torch_version=torch.__version__,
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        compute_capability=f"{major}.{minor}",
    )


def load_artifact(bundle: Path, artifact: Artifact, device: torch.device) -> Program:
    """Load a torch program from a bundle (folder with an exported model).

    If the bundle has a program that was compiled ahead of time for this version of torch and Python
    and this GPU architecture, load the compiled program. Otherwise, load the exported program. On a
    GPU, the first call of an exported program compiles it.

    Args:
        bundle: folder of the bundle.
        artifact: manifest entry of the program; its kind is `torch`.
        device: the CPU, or a GPU with its index.

    Raises:
        BundleError: the program's file is missing or damaged, or the exported program was written
            by another version of torch, or takes images of another dtype or size than the manifest
            states.
    """
    compiled = artifact.compiled
    is_gpu = device.type == "cuda"
    if is_gpu and compiled is not None and compiled.target == current_target(device):
        path = verified_path(bundle, compiled)
        return load_compiled_program(path, artifact.precision, device)
    path = verified_path(bundle, artifact)
    exported = load_exported_program(path, device)
    check_images(path, exported, artifact)
    return program_from_exported(exported, artifact.precision, device)


def compile_program(
    path: Path,
    precision: Precision,
    device: torch.device,
    images: torch.Size,
    dtype: torch.dtype,
    *,
    any_batch: bool,
) -> bytes:
    """Compile an exported program, and return the result as bytes for `write_compiled_program`.

    Args:
        path: file of the exported program.
        precision: precision in which the program was exported.
        device: device to compile for: a GPU with its index, or the CPU.
        images: shape [2, 3, H, W] of an example batch; H x W is the program's fixed input size.
        dtype: dtype of the images.
        any_batch: True: compile for all batch sizes above 1. False: compile for batch size 1 only.
    """
    program = load_exported_program(path, device)
    batch = torch.zeros(images, dtype=dtype, device=device)
    if not any_batch:
        batch = batch[:1]
    with torch.no_grad(), torch_math_mode(precision), ignore_torch_warnings():
        return _compiled(program, _weights(program), batch, any_batch=any_batch)


def write_compiled_program(path: Path, one: bytes, many: bytes, compiled: Path) -> None:
    """Write the code and the weights of a compiled program to a file.

    Args:
        path: file of the exported program.
        one: output of `compile_program` for batch size 1.
        many: output of `compile_program` for larger batches.
        compiled: path of the file to write.
    """
    weights = _weights(load_exported_program(path, torch.device("cpu")))
    _write(compiled, {"weights": weights, "one": one, "many": many})


def add_kernels(
    path: Path, precision: Precision, device: torch.device, images: torch.Size, dtype: torch.dtype
) -> None:
    """Run a compiled program, and store the kernels compiled during the run in the program's file.

    Call this function only in a new process, because it redirects the caches of compiled kernels,
    and because kernels that the process has already compiled would be missing.

    Args:
        path: file that `write_compiled_program` wrote.
        precision: precision of the program.
        device: GPU with its index.
        images: shape [2, 3, H, W] of an example batch.
        dtype: dtype of the images.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "triton"))
        program = load_compiled_program(path, precision, device)
        stored = cached_kernels(device)  # kernels that the file already contains
        batch = torch.zeros(images, dtype=dtype, device=device)
        sizes = torch.tensor([images[2:]] * len(batch), device=device)
        for count in (1, len(batch)):
            program.prepare(batch[:count], sizes[:count])
        kernels = {
            name: content
            for name, content in cached_kernels(device).items()
            if name not in stored or name.endswith(".so")
        }
    file = torch.load(path, weights_only=True)
    _write(path, {**file, "kernels": file.get("kernels", {}) | kernels})


def load_compiled_program(path: Path, precision: Precision, device: torch.device) -> Program:
    """Load a compiled program from a file that `write_compiled_program` wrote.

    The file must have been written with this environment's versions of torch and Python, and, on a
    GPU, for the GPU's compute capability.

    Args:
        path: file of the compiled program.
        precision: precision of the program. TF32 arithmetic is allowed only for `tf32`.
        device: a GPU with its index if the program was compiled for a GPU, else the CPU.
    """
    file = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    if "kernels" in file:
        restore_kernels(file["kernels"], device)
    weights = [weight.to(device) for weight in file["weights"]]
    with config.patch(compile_threads=1):  # otherwise torch starts compiler processes
        one, many = (AOTCompiledArtifact.deserialize(file[name]) for name in ("one", "many"))

    def run(images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        code = one if len(images) == 1 else many
        return tuple(code(*weights, images, image_sizes))

    return Program(run, precision, device)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    # Let Python write the file, so that a full disk raises an OSError.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic_write(path) as file:
        file.write(buffer.getbuffer())


def _weights(program: ExportedProgram) -> list[Tensor]:
    """Return a program's parameters, buffers and constants, ordered as the graph's inputs."""
    values = {**program.state_dict, **program.constants}
    inputs = program.graph_signature.input_specs
    return [values[i.target].detach() for i in inputs if i.kind != InputKind.USER_INPUT]


def _compiled(
    program: ExportedProgram, weights: Sequence[Tensor], images: Tensor, *, any_batch: bool
) -> bytes:
    """Compile an exported program, and return the compiled program as bytes.

    Args:
        program: exported program on the device to compile for.
        weights: output of `_weights` for the program.
        images: example batch [B, 3, H, W] on this device.
        any_batch: True: compile for all batch sizes above 1. False: compile for batch size B only.
    """
    # Use a new shape environment (torch's record of symbolic sizes). With the environment of the
    # loaded program, torch confuses expressions of sizes with symbols.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first = DimDynamic.DYNAMIC if any_batch else DimDynamic.STATIC
    sides = StatelessSymbolicContext([first, *[DimDynamic.STATIC] * 3])  # type: ignore[var-annotated]
    batch = mode.from_tensor(images, symbolic_context=sides, source=ConstantSource("images"))
    sizes = batch.new_empty((batch.shape[0], 2), dtype=torch.int64)
    fixed = (mode.from_tensor(weight, static_shapes=True) for weight in weights)
    with tracing(TracingContext(mode)), config.patch(configure_inductor()):
        code = standalone_compile(
            program.graph_module,
            [*fixed, batch, sizes],
            dynamic_shapes="from_tracing_context",
            aot=True,
        )
    assert isinstance(code, AOTCompiledArtifact)
    return code.serialize()

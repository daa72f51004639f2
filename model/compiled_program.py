"""A program compiled ahead of time: code for one kind of GPU, in a file with the weights.

A process that loads it neither reads the program nor traces it, which is most of what it would wait
for before its first answer. Torch has no public interface for that yet: the names with underscores
are those that other engines on top of it use, and may move with its version.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config, standalone_compile
from torch._inductor.standalone_compile import AOTCompiledArtifact
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .manifest import Artifact, CompileTarget, Precision, verified_path
from .program import Program, arithmetic, exported_program, load_program, quiet_torch


def current_target() -> CompileTarget:
    """What is compiled in this process for the current GPU depends on."""
    major, minor = torch.cuda.get_device_capability()
    return CompileTarget(
        torch_version=torch.__version__,
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        compute_capability=f"{major}.{minor}",
    )


def artifact_program(bundle: Path, artifact: Artifact, device: torch.device) -> Program:
    """The program of a bundle's artefact: what was compiled of it, where that fits.

    Args:
        bundle: the bundle's folder.
        artifact: a program of torch.
        device: a CPU, or a GPU by its index.

    Raises:
        BundleError: a file is missing or damaged.
    """
    compiled = artifact.compiled
    if device.type == "cuda" and compiled is not None and compiled.target == current_target():
        path = verified_path(bundle, compiled)
        return load_compiled_program(path, artifact.precision, device)
    return load_program(verified_path(bundle, artifact), artifact.precision, device)


def write_compiled_program(
    path: Path,
    precision: Precision,
    device: torch.device,
    images: torch.Size,
    dtype: torch.dtype,
    compiled: Path,
) -> None:
    """Compile a program, once for batches of one and once for all, and write what comes of it.

    Args:
        path: what export wrote.
        precision: its artefact's.
        device: what to compile for: a GPU by its index, or a CPU.
        images: [2, 3, H, W], the shape of a batch of its images.
        dtype: their type.
        compiled: file to write.
    """
    program = exported_program(path, device)
    weights = _weights(program)
    batch = torch.zeros(images, dtype=dtype, device=device)
    with torch.no_grad(), arithmetic(precision), quiet_torch():
        one = _compiled(program, weights, batch[:1], any_batch=False)
        many = _compiled(program, weights, batch, any_batch=True)
    file = {"weights": [weight.cpu() for weight in weights], "one": one, "many": many}
    torch.save(file, compiled)


def load_compiled_program(path: Path, precision: Precision, device: torch.device) -> Program:
    """What `write_compiled_program` wrote, by the same torch for the same kind of device."""
    file = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    weights = [weight.to(device) for weight in file["weights"]]
    with config.patch(compile_threads=1):  # or processes would be started that compile
        one, many = (AOTCompiledArtifact.deserialize(file[name]) for name in ("one", "many"))

    def run(images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        code = one if len(images) == 1 else many
        return tuple(code(*weights, images, image_sizes))

    return Program(run, precision, device)


def _weights(program: ExportedProgram) -> list[Tensor]:
    """Parameters, buffers and constants in the order in which its graph takes them."""
    values = {**program.state_dict, **program.constants}
    inputs = program.graph_signature.input_specs
    return [values[i.target].detach() for i in inputs if i.kind != InputKind.USER_INPUT]


def _compiled(
    program: ExportedProgram, weights: Sequence[Tensor], images: Tensor, *, any_batch: bool
) -> bytes:
    """The code of a program, for batches of the size of `images` or of any."""
    # Of its own, as that of a program that was read mistakes expressions for symbols.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first = DimDynamic.DYNAMIC if any_batch else DimDynamic.STATIC
    sides = StatelessSymbolicContext([first, *[DimDynamic.STATIC] * 3])  # type: ignore[var-annotated]
    batch = mode.from_tensor(images, symbolic_context=sides, source=ConstantSource("images"))
    sizes = batch.new_empty((batch.shape[0], 2), dtype=torch.int64)
    fixed = (mode.from_tensor(weight, static_shapes=True) for weight in weights)
    with tracing(TracingContext(mode)):
        code = standalone_compile(
            program.graph_module,
            [*fixed, batch, sizes],
            dynamic_shapes="from_tracing_context",
            aot=True,
        )
    assert isinstance(code, AOTCompiledArtifact)
    return code.serialize()

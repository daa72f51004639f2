"""A program compiled ahead of time: code for one kind of GPU, in a file with the weights.

A process that loads it neither reads the program nor traces it, which is most of what it would wait
for before its first answer.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import standalone_compile
from torch._inductor.standalone_compile import AOTCompiledArtifact
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from .manifest import Artifact, CompiledProgram, Precision, verified_path
from .program import Program, arithmetic, load_module, load_program, quiet_torch


def compile_target() -> tuple[str, str]:
    """What compiled code depends on: the version of torch, and the current GPU's capability."""
    major, minor = torch.cuda.get_device_capability()
    return torch.__version__, f"{major}.{minor}"


def fits_here(compiled: CompiledProgram) -> bool:
    """Whether it was compiled by this version of torch for GPUs like the current one."""
    return (compiled.torch_version, compiled.compute_capability) == compile_target()


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
    if device.type == "cuda" and compiled is not None and fits_here(compiled):
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
    module = load_module(path, device)
    batch = torch.zeros(images, dtype=dtype, device=device)
    sizes = torch.tensor(images[2:], device=device).repeat(len(batch), 1)
    any_batch = {0: Dim("batch", min=1)}
    with torch.no_grad(), arithmetic(precision), quiet_torch():
        one = torch.export.export(module, (batch[:1], sizes[:1]))
        many = torch.export.export(
            module, (batch, sizes), dynamic_shapes=(any_batch, any_batch), strict=False
        )
        functions = {"one": _function(one), "many": _function(many)}
    weights = {name: weight.detach().cpu() for name, weight in _weights(many).items()}
    torch.save({"weights": weights, **functions}, compiled)


def load_compiled_program(path: Path, precision: Precision, device: torch.device) -> Program:
    """What `write_compiled_program` wrote, by the same torch for the same kind of device."""
    file = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    weights = {name: weight.to(device) for name, weight in file["weights"].items()}
    one, many = (_loaded_function(file[name], weights) for name in ("one", "many"))

    def run(images: Tensor, image_sizes: Tensor) -> tuple[Tensor, ...]:
        return tuple((one if len(images) == 1 else many)(images, image_sizes))

    return Program(run, precision, device)


def _weights(program: ExportedProgram) -> dict[str, Tensor]:
    """Parameters, buffers and constants by name, in the order in which its graph takes them."""
    values = {**program.state_dict, **program.constants}
    inputs = program.graph_signature.input_specs
    return {i.target: values[i.target] for i in inputs if i.kind != InputKind.USER_INPUT}


def _function(program: ExportedProgram) -> dict[str, Any]:
    """The code of a program, and the names of the weights that it takes before its inputs."""
    graph = program.graph_module.graph
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    for output in graph.output_node().args[0]:
        output.meta["example_value"] = output.meta["val"]  # in which it looks for the sizes
    code = standalone_compile(program.graph_module, inputs, aot=True)
    assert isinstance(code, AOTCompiledArtifact)
    return {"weights": list(_weights(program)), "code": code.serialize()}


def _loaded_function(
    function: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> Callable[..., Sequence[Tensor]]:
    code = AOTCompiledArtifact.deserialize(function["code"])
    taken = [weights[name] for name in function["weights"]]
    return lambda *inputs: code(*taken, *inputs)

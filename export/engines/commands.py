"""`maskrcnn engine`: inspect, profile and refit TensorRT and TensorRT-RTX engines."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from rich.table import Table

from ...model.bundle.manifest import (
    ARTIFACT_SUFFIXES,
    MANIFEST_NAME,
    Artifact,
    BundleError,
    EngineBuild,
    EngineKind,
    read_manifest,
    verified_path,
)
from ...plugins.runtime.console import table_console
from ..errors import EngineError

if TYPE_CHECKING:
    from .inspection import EngineTensor
    from .layers import Layer


# Kind of engine by file name suffix.
_KINDS: Mapping[str, EngineKind] = {ARTIFACT_SUFFIXES[kind]: kind for kind in get_args(EngineKind)}


@click.group()
def engine() -> None:
    """Inspect, profile and refit TensorRT and TensorRT-RTX engines."""


@engine.command()
@click.argument("plan", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(plan: Path, as_json: bool) -> None:
    """Show the tensors and layers of PLAN, with their types.

    If PLAN is in a bundle, also show the build settings of PLAN. The hash of PLAN must match the
    bundle's manifest. Inspect only plans that you trust, because loading a plan can run code.
    Listing tensors and layers requires a GPU that can load the plan. Without such a GPU, the
    command fails, with one exception: if PLAN is in a bundle and --json is given, the JSON has the
    reason as `note`, and no tensors and layers.
    """
    from .inspection import inspected_layers, inspected_tensors, load_engine

    kind = _kind_of(plan)
    artifact = _artifact_of(plan)
    if artifact and not as_json:
        table_console().print(_table_of_build(artifact))
    try:
        trt, loaded = load_engine(plan, kind)
        tensors, layers = inspected_tensors(trt, loaded), inspected_layers(trt, loaded)
    except EngineError as error:
        if artifact is None or not as_json:
            raise
        click.echo(json.dumps(_record(plan, artifact, note=str(error)), indent=2))
        return
    if as_json:
        click.echo(json.dumps(_record(plan, artifact, tensors, layers), indent=2))
        return
    for table in (table_of_tensors(tensors), table_of_layers(layers), table_of_types(layers)):
        table_console().print(table)


@engine.command()
@click.argument("plan", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--runs", type=click.IntRange(1), default=50, show_default=True, help="Batches to measure."
)
def profile(plan: Path, batch: int, runs: int) -> None:
    """Show the GPU time of each layer of PLAN, the slowest first.

    Profile only plans that you trust, because loading a plan can run code. The images are noise.
    Layers that run at the same time are measured one after another, so the sum of the times can be
    longer than the time that `maskrcnn bench infer` reports.
    """
    from .inspection import inspected_layers, load_engine
    from .profiling import profile_layers

    kind = _kind_of(plan)
    _artifact_of(plan)
    trt, loaded = load_engine(plan, kind)
    times = profile_layers(trt, loaded, batch, runs)
    kinds = {layer.name: layer.kind for layer in inspected_layers(trt, loaded)}
    table_console().print(table_of_times(times, kinds))


@engine.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
def refit(bundle: Path) -> None:
    """Insert the weights of BUNDLE's ONNX files into engines built with --strip-weights.

    Run this command with the GPU type and TensorRT version with which the engines were built.
    """
    from .refit import refit_bundle

    refitted = refit_bundle(bundle)
    for path in refitted:
        click.echo(f"inserted the weights into {path}")
    if not refitted:
        click.echo(f"{bundle} has no engine with missing weights; there is nothing to insert")


def table_of_times(times: Mapping[str, float], kinds: Mapping[str, str]) -> Table:
    """Return a table of layers with their GPU times, slowest first, and a row with the sum.

    Both arguments have layer names as keys. The values are milliseconds in `times`, and TensorRT's
    layer types in `kinds`.
    """
    table = Table("layer", "kind", "ms", "share")
    total = sum(times.values())
    for name, ms in sorted(times.items(), key=lambda item: -item[1]):
        table.add_row(name, kinds.get(name, ""), f"{ms:.3f}", f"{ms / total:.1%}")
    table.add_row("all", "", f"{total:.3f}", "")
    return table


def _kind_of(plan: Path) -> EngineKind:
    kind = _KINDS.get(plan.suffix)
    if kind is None:
        raise click.BadParameter(
            f"{plan} is not an engine; its name must end in {' or '.join(_KINDS)}",
            param_hint="PLAN",
        )
    return kind


def _artifact_of(plan: Path) -> Artifact | None:
    """Return a plan's entry in its bundle's manifest, or None if the plan is not in a bundle.

    Raises:
        BundleError: the manifest does not list the plan, or lists another hash for it.
    """
    bundle = plan.parent
    if not (bundle / MANIFEST_NAME).is_file():
        return None
    for artifact in read_manifest(bundle).artifacts:
        if artifact.path == plan.name:
            verified_path(bundle, artifact)
            return artifact
    raise BundleError(
        f"{plan} is in a bundle whose manifest does not list it; move the engine out of "
        "the bundle to inspect it"
    )


def _record(
    plan: Path,
    artifact: Artifact | None,
    tensors: "Sequence[EngineTensor]" = (),
    layers: "Sequence[Layer]" = (),
    note: str | None = None,
) -> dict[str, Any]:
    return {
        "plan": str(plan),
        "bytes": plan.stat().st_size,
        "artifact": artifact.model_dump(mode="json") if artifact else None,
        "note": note,
        "tensors": [asdict(tensor) for tensor in tensors],
        "layers": [asdict(layer) for layer in layers],
        "types": dict(_types_of(layers)),
    }


def _table_of_build(artifact: Artifact) -> Table:
    """Return a table of the build settings in the manifest entry of an engine."""
    build = artifact.engine
    assert isinstance(build, EngineBuild)
    table = Table("built", "", title=artifact.path, title_justify="left", show_header=False)
    batches = ", ".join(f"{p.min} to {p.max}, best {p.opt}" for p in build.profiles)
    plugins = ", ".join(f"{name} {version}" for name, version in build.plugins.items())
    for name, value in {
        "precision": artifact.precision,
        "input": f"{artifact.bucket} {artifact.input_dtype}",
        "batch by profile": batches,
        "with": f"{artifact.kind} {build.runtime_version}, CUDA {build.cuda_version}",
        "for compute capability": ", ".join(build.compute_capabilities),
        "on": ", ".join(filter(None, (build.gpu_name, build.platform))),
        "compatible with": " and ".join(_compatibility(build)) or "this version and hardware only",
        "weights": "none; insert them with `maskrcnn engine refit`" if build.stripped else "all",
        "PTX": build.ptx_version or "none",
        "plugins": plugins or "none",
    }.items():
        table.add_row(name, value)
    return table


def _compatibility(build: EngineBuild) -> list[str]:
    gpus = [] if build.hardware_compatibility == "none" else [build.hardware_compatibility]
    return gpus + ["newer versions"] * build.version_compatible


def table_of_tensors(tensors: "Sequence[EngineTensor]") -> Table:
    """Return a table of tensors, with each profile's minimum, optimum and maximum shape."""
    table = Table("tensor", "", "type", "shape", "profiles")
    for t in tensors:
        ranges = "; ".join(" ".join(map(_shape, shapes)) for shapes in t.profiles)
        table.add_row(t.name, "input" if t.is_input else "output", t.dtype, _shape(t.shape), ranges)
    return table


def table_of_layers(layers: "Sequence[Layer]") -> Table:
    """Return a table of layers in execution order, with the tensors that they read and write."""
    table = Table("", "layer", "kind", "reads", "writes")
    for number, layer in enumerate(layers):
        sides = (
            ", ".join(f"{t.dtype or '?'} {_shape(t.shape)}" for t in side)
            for side in (layer.inputs, layer.outputs)
        )
        table.add_row(str(number), layer.name, layer.kind, *sides)
    return table


def table_of_types(layers: "Sequence[Layer]") -> Table:
    """Return a table that counts layers, convolutions and matrix products by input types."""
    table = Table("reads", "layers", "share", "convolutions", "matrix products")
    convolutions = _types_of([layer for layer in layers if layer.is_convolution])
    products = _types_of([layer for layer in layers if layer.is_matrix_product])
    for types, count in _types_of(layers).most_common():
        heavy = (str(convolutions[types]), str(products[types]))
        table.add_row(types, str(count), f"{count / len(layers):.0%}", *heavy)
    return table


def _types_of(layers: "Sequence[Layer]") -> Counter[str]:
    """Count layers by their `compute_types`. Keys look like `fp16`, `fp16 fp32` or `none`."""
    return Counter(" ".join(sorted(layer.compute_types)) or "none" for layer in layers)


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join("N" if size < 0 else str(size) for size in sizes) or "scalar"

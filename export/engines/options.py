"""Command-line options of engine builds, and their validation."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import click
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from ...model.bundle.manifest import EngineKind, HardwareCompatibility
from ...model.config.option_types import OUTPUT_FILE, FiniteRange
from ...plugins.runtime.compute_capability import CapabilityType

Tiling = Literal["none", "fast", "moderate", "full"]

_Command = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Build options that all engines of an export share.

    Raises:
        pydantic.ValidationError: a value is invalid.
    """

    # Batch sizes to optimize for. The largest is the engine's maximum batch size.
    batches: tuple[PositiveInt, ...] = Field((1, 8), min_length=1)
    # TensorRT only. True: use our CUDA kernels. False: use the ONNX function bodies.
    plugins: bool = True
    # TensorRT-RTX only: compute capabilities to build for, as `8.9`. Empty: build for all that
    # TensorRT-RTX supports from 8.0 on.
    compute_capabilities: tuple[str, ...] = ()
    # Limit of a layer's scratch memory in GiB. None: TensorRT decides.
    workspace_gib: float | None = None
    # TensorRT only: file of measured kernel timings. None: a file in the user's cache folder.
    timing_cache: Path | None = None
    # Raise an error instead of a warning if an engine computes in another precision.
    strict: bool = False
    # TensorRT only, like all options below. Whether each batch size from 1 to the largest gets its
    # own optimization profile.
    profile_per_batch: bool = False
    # Effort of the builder, 0 to 5. None: TensorRT's default, 3.
    optimization_level: int | None = Field(None, ge=0, le=5)
    # Effort of the builder's search for tilings that keep data in the L2 cache between layers.
    tiling: Tiling = "none"
    # Maximum number of CUDA streams besides the main one. None: TensorRT decides.
    aux_streams: NonNegativeInt | None = None
    # Other GPUs that can run the engine. Unless `none`, the engine is slower.
    hardware_compatibility: HardwareCompatibility = "none"
    # Whether newer versions of TensorRT can load the engine. If so, the engine is slower.
    version_compatible: bool = False
    # Whether to build engines without weights. `refit_bundle` inserts the weights later.
    strip_weights: bool = False


_OPTIONS = (
    click.option(
        "--engine", "kinds", multiple=True, type=click.Choice(["torch", *get_args(EngineKind)]),
        help="Engines to build in addition to the ONNX files. torch: a torch program, compiled if "
        "this machine has a GPU. tensorrt: engines for this machine's GPU, with our CUDA kernels. "
        "tensorrt-rtx: engines for several GPUs; building them needs no GPU.",
    ),
    click.option(
        "--batch", "batches", multiple=True, type=click.IntRange(min=1),
        help="Batch sizes to optimize engines for; the largest is their limit.  [default: 1, 8]",
    ),
    click.option(
        "--compute-capability", "compute_capabilities", multiple=True, type=CapabilityType(),
        help="Compute capabilities of the GPUs that tensorrt-rtx builds for, such as 8.6 8.9 12.0. "
        "If left out, all from 8.0 on that the installed TensorRT-RTX supports.",
    ),
    click.option(
        "--plugins/--no-plugins", default=None,
        help="Whether tensorrt engines use our CUDA kernels or standard operators.  "
        "[default: plugins]",
    ),
    click.option(
        "--workspace", "workspace_gib", type=FiniteRange(min=0, min_open=True), metavar="GIB",
        help="Maximum scratch memory of each layer on the GPU, in GiB. If left out, TensorRT "
        "decides.",
    ),
    click.option(
        "--timing-cache", type=OUTPUT_FILE,
        help="File of tensorrt's kernel timings, which makes the next build faster. If left out, "
        "a file for this GPU and TensorRT version in the user's cache folder.",
    ),
    click.option(
        "--optimization-level", type=click.IntRange(0, 5),
        help="Effort of tensorrt's builder. If left out, TensorRT's default (3).",
    ),
    click.option(
        "--tiling", type=click.Choice(get_args(Tiling)),
        help="Effort of tensorrt's search for tilings that keep data in the L2 cache between "
        "layers.  [default: none]",
    ),
    click.option(
        "--aux-streams", type=click.IntRange(min=0),
        help="Maximum number of additional CUDA streams of a tensorrt engine. If left out, "
        "TensorRT decides.",
    ),
    click.option(
        "--hardware-compatibility", type=click.Choice(get_args(HardwareCompatibility)),
        help="Other GPUs that can run tensorrt engines, at a cost in speed.  [default: none]",
    ),
    click.option(
        "--version-compatible", is_flag=True, default=None,
        help="Let newer versions of TensorRT load tensorrt engines, at a cost in speed.",
    ),
    click.option(
        "--strip-weights", is_flag=True, default=None,
        help="Build small tensorrt engines without weights. To insert the weights, run `maskrcnn "
        "engine refit BUNDLE` on the machine that serves the engines.",
    ),
    click.option(
        "--strict", is_flag=True, default=None,
        help="If an engine computes in another precision than requested, fail instead of logging a "
        "warning.",
    ),
    click.option(
        "--build-log", type=OUTPUT_FILE,
        help="File for TensorRT's messages. If left out, BUNDLE.build.log beside the bundle.",
    ),
)  # fmt: skip
_ALL_KINDS = frozenset(get_args(EngineKind))
# Name of each option, and the kinds of engine that it applies to.
_APPLIES_TO = {
    "batches": ("--batch", _ALL_KINDS),
    "compute_capabilities": ("--compute-capability", {"tensorrt-rtx"}),
    "plugins": ("--plugins", {"tensorrt"}),
    "workspace_gib": ("--workspace", _ALL_KINDS),
    "timing_cache": ("--timing-cache", {"tensorrt"}),
    "build_log": ("--build-log", _ALL_KINDS),
    "strict": ("--strict", _ALL_KINDS),
    **{
        name: (f"--{name.replace('_', '-')}", {"tensorrt"})
        for name in (
            "optimization_level",
            "tiling",
            "aux_streams",
            "hardware_compatibility",
            "version_compatible",
            "strip_weights",
        )
    },
}


def engine_options(command: _Command) -> _Command:
    """Add the engine options to a click command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_engine_choices(
    choices: Mapping[str, object], bundle: Path, kinds: Sequence[EngineKind]
) -> None:
    """Check that each option applies to one of `kinds`, and that no path is inside the bundle.

    Args:
        choices: values of the options on the command line, by parameter name.
        bundle: resolved path of the bundle.
        kinds: kinds of engine that will be built.

    Raises:
        click.UsageError: an option applies to none of `kinds`, or a path is inside the bundle
            folder.
    """
    for name, value in choices.items():
        option, kinds_with_option = _APPLIES_TO[name]
        option = "--no-plugins" if (name, value) == ("plugins", False) else option
        if not kinds_with_option & set(kinds):
            needed = " or ".join(f"--engine {kind}" for kind in sorted(kinds_with_option))
            raise click.UsageError(f"{option} has no effect without {needed}")
        if isinstance(value, Path) and value.resolve().is_relative_to(bundle):
            raise click.UsageError(
                f"{option} {value} is inside the bundle, which is replaced as a whole; choose a "
                "file outside of it"
            )

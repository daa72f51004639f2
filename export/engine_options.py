"""Options of the command line that say which engines to build."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ..model.manifest import EngineKind
from ..model.option_types import FiniteRange
from ..plugins.compute_capability import CapabilityType

if TYPE_CHECKING:
    from .engine_build import EngineBuilder

ENGINE_SUFFIXES: Mapping[EngineKind, str] = {"tensorrt": ".plan", "tensorrt-rtx": ".rtx"}
"""How names of engines end."""

_Command = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the user chooses about engines."""

    batches: tuple[int, ...] = (1, 8)
    """Batch sizes to optimise for; the largest is the largest that an engine takes."""
    plugins: bool = True
    """Whether TensorRT's engines carry our CUDA kernels; otherwise the ONNX function bodies."""
    compute_capabilities: tuple[str, ...] = ()
    """GPUs that TensorRT-RTX builds for, as in `8.9`; where empty, all that it can."""
    workspace_gib: float | None = None
    """Most memory that a layer may use beside its tensors; TensorRT's choice where None."""
    timing_cache: Path | None = None
    """File in which TensorRT keeps what it measured; in the user's cache folder where None."""


_FILE = click.Path(path_type=Path, dir_okay=False)
_OPTIONS = (
    click.option(
        "--engine", "kinds", multiple=True, type=click.Choice(["torch", *get_args(EngineKind)]),
        help="What to make beside the ONNX files: torch, a program, compiled for this machine's "
        "GPU if it has one; tensorrt, engines for that GPU, with our CUDA kernels; tensorrt-rtx, "
        "engines for several GPUs, whether or not one is here.",
    ),
    click.option(
        "--batch", "batches", multiple=True, type=click.IntRange(min=1),
        help="Batch sizes that engines are made for; the largest is their limit.  [default: 1, 8]",
    ),
    click.option(
        "--compute-capability", "compute_capabilities", multiple=True, type=CapabilityType(),
        help="GPUs that tensorrt-rtx builds for, as 8.6 8.9 12.0. If left out, all from 8.0 on.",
    ),
    click.option(
        "--plugins/--no-plugins", default=None,
        help="Whether tensorrt takes our CUDA kernels or standard operators.  [default: plugins]",
    ),
    click.option(
        "--workspace", "workspace_gib", type=FiniteRange(min=0, min_open=True), metavar="GIB",
        help="Most GPU memory for the scratch space of a layer. If left out, TensorRT decides.",
    ),
    click.option(
        "--timing-cache", type=_FILE,
        help="Where tensorrt keeps what it measures, to build sooner next time. If left out, a "
        "file for this GPU and version in the user's cache folder.",
    ),
    click.option(
        "--build-log", type=_FILE,
        help="Where to write all that TensorRT says. If left out, BUNDLE.build.log beside the "
        "bundle.",
    ),
)  # fmt: skip
_BOTH = frozenset(get_args(EngineKind))
_BELONGS = {
    "batches": ("--batch", _BOTH),
    "compute_capabilities": ("--compute-capability", {"tensorrt-rtx"}),
    "plugins": ("--plugins", {"tensorrt"}),
    "workspace_gib": ("--workspace", _BOTH),
    "timing_cache": ("--timing-cache", {"tensorrt"}),
    "build_log": ("--build-log", _BOTH),
}


def engine_options(command: _Command) -> _Command:
    """Give a command the options that `builders_from_options` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def builders_from_options(
    bundle: Path, kinds: Sequence[EngineKind], **choices: Any
) -> "list[EngineBuilder]":
    """Builders of the engines that were asked for, one a kind.

    Args:
        bundle: the folder that is to hold the engines.
        kinds: values of `--engine`.
        choices: values of the other options, None or empty where not given.

    Raises:
        click.UsageError: an option is for a kind of engine that was not asked for.
        ModuleNotFoundError: TensorRT or TensorRT-RTX is not installed.
        EngineError: this machine cannot build such engines.
    """
    bundle = bundle.resolve()
    given = {name: value for name, value in choices.items() if value not in (None, ())}
    for name, value in given.items():
        _check_choice(name, value, bundle, kinds)
    if not kinds:
        return []
    if "timing_cache" in given:
        _check_writable(given["timing_cache"])
    from .build_log import BuildLog
    from .engine_build import builder_for

    log = BuildLog(given.pop("build_log", bundle.with_name(f"{bundle.name}.build.log")))
    options = EngineOptions(**given)
    return [builder_for(kind, options, log) for kind in dict.fromkeys(kinds)]


def _check_choice(name: str, value: object, bundle: Path, kinds: Sequence[EngineKind]) -> None:
    """Refuse an option that no engine has a use for, and a file that would go with an old bundle.

    Raises:
        click.UsageError: it is one.
    """
    option, owners = _BELONGS[name]
    if not owners & set(kinds):
        needed = " or ".join(f"--engine {kind}" for kind in sorted(owners))
        raise click.UsageError(f"{option} is of no use without {needed}")
    if isinstance(value, Path) and value.resolve().is_relative_to(bundle):
        raise click.UsageError(
            f"{option} {value} is in the bundle, which is replaced as a whole; choose a file "
            "outside of it"
        )


def _check_writable(timing_cache: Path) -> None:
    """Refuse a file that cannot be written, of which the build would say nothing.

    Raises:
        click.BadParameter: it is one.
    """
    try:
        timing_cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=timing_cache.parent):
            pass
    except OSError as error:
        raise click.BadParameter(
            f"no file can be made in {timing_cache.parent} ({error.strerror}); choose another",
            param_hint="--timing-cache",
        ) from None

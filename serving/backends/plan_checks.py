"""Checks whether TensorRT plans run on this machine. Each error names a remedy."""

import importlib
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Final, NamedTuple

from ...model.bundle.manifest import Artifact, BatchProfile, EngineKind, current_platform
from ..errors import BackendError
from .base import batch_sizes


class Runtime(NamedTuple):
    """Runtime library for the plans of one engine kind."""

    # Name in messages.
    title: str
    # Python module of the library.
    module: str
    # Extra of this package that installs the library.
    extra: str


RUNTIMES: Final[Mapping[EngineKind, Runtime]] = {
    "tensorrt": Runtime("TensorRT", "tensorrt", "tensorrt"),
    "tensorrt-rtx": Runtime("TensorRT-RTX", "tensorrt_rtx", "rtx"),
}

# Major compute capabilities that TensorRT-RTX supports.
RTX_MAJORS: Final = ("7", "8", "12")

_FREE_MEMORY: Final = (
    "end processes that use GPU memory (nvidia-smi lists them), lower --max-batch or serve a lower "
    "--precision"
)

# Text of the remedy by regular expression of TensorRT's error message.
_REMEDIES: Final = {
    r"out\s?of\s?memory|insufficient memory": _FREE_MEMORY,
    r"find plugin|plugin\S* not found|plugin creator": "export the engine again with this version "
    "of maskrcnn-trt, which embeds the plugins",
}


class PlanTarget(NamedTuple):
    """Properties of a machine that decide which plans of an engine kind run on it."""

    # Version of TensorRT or TensorRT-RTX.
    runtime_version: str
    # Compute capability of the GPU, such as `9.0`.
    compute_capability: str
    # Operating system and architecture, such as `linux-x86_64`.
    platform: str
    # Free GPU memory in bytes.
    free_memory: int


def probe_machine(kind: EngineKind) -> PlanTarget:
    """Return the properties of this machine that decide which plans run on it.

    Raises:
        BackendError: the machine has no GPU, or a Python module is missing.
    """
    runtime = RUNTIMES[kind]
    trt = _import_module(runtime.module, runtime)
    cuda = _import_module("pycuda.driver", runtime)
    from .pycuda_device import compute_capability, current_gpu, free_memory

    try:
        with current_gpu():
            return PlanTarget(
                runtime_version=trt.__version__,
                compute_capability=compute_capability(),
                platform=current_platform(),
                free_memory=free_memory(),
            )
    except cuda.Error as error:
        raise BackendError(
            f"no GPU responds ({error}); check nvidia-smi, or use --backend onnxruntime"
        ) from None


def check_plans(
    kind: EngineKind, artifacts: Sequence[Artifact], machine: PlanTarget, plan_bytes: int
) -> None:
    """Check plans against a machine by their manifest entries, without loading them.

    Args:
        kind: Engine kind of the artifacts.
        artifacts: Plans that are loaded together.
        machine: The machine.
        plan_bytes: Total size of the plan files, a lower bound of their GPU memory.

    Raises:
        BackendError: the plans do not run on the machine.
    """
    if kind == "tensorrt-rtx" and machine.compute_capability.split(".")[0] not in RTX_MAJORS:
        raise BackendError(
            f"TensorRT-RTX does not run on compute capability {machine.compute_capability}, only "
            "on 7.5, 8.x and 12.x; use --backend tensorrt or onnxruntime"
        )
    for artifact in artifacts:
        _check_build(kind, artifact, machine)
    check_memory(plan_bytes, machine.free_memory)


def check_memory(needed: int, free: int) -> None:
    """Check that plans fit into the free GPU memory; both sizes are in bytes.

    Raises:
        BackendError: `needed` exceeds `free`.
    """
    if needed > free:
        raise BackendError(
            f"the plans need {needed / 2**20:.0f} MiB of GPU memory and {free / 2**20:.0f} MiB are "
            f"free; {_FREE_MEMORY}"
        )


def remedy_from_reason(reason: str) -> str | None:
    """Return the text of the remedy for an error that TensorRT logged. None: unknown error."""
    return next((r for p, r in _REMEDIES.items() if re.search(p, reason, re.IGNORECASE)), None)


def batch_profiles(profiles: Sequence[BatchProfile], max_batch: int) -> dict[int, int]:
    """Choose the batch sizes of a plan, and the TensorRT optimization profile of each.

    The sizes are those of `batch_sizes`. A size below its profile's minimum becomes that minimum.

    Args:
        profiles: Profiles of the plan.
        max_batch: Maximum batch size.

    Returns:
        Index of the profile by batch size, in ascending order of size.

    Raises:
        BackendError: the largest batch exceeds every profile.
    """
    largest = max(profile.max for profile in profiles)
    if max_batch > largest:
        raise BackendError(
            f"--max-batch is {max_batch}, but the plan's largest batch is {largest}; lower "
            f"--max-batch to {largest}, or export the engine with `--batch {max_batch}`"
        )
    chosen: dict[int, int] = {}
    for size in batch_sizes(max_batch):
        fitting = [index for index, profile in enumerate(profiles) if profile.max >= size]
        # A profile that needs no padding goes first, then the smallest.
        best = min(fitting, key=lambda i: (profiles[i].min > size, profiles[i].max))
        chosen[max(size, profiles[best].min)] = best
    return chosen


def _check_build(kind: EngineKind, artifact: Artifact, machine: PlanTarget) -> None:
    build = artifact.engine
    assert build is not None  # guaranteed by the manifest
    built, here = [], []
    if build.runtime_version != machine.runtime_version:
        built.append(f"with {RUNTIMES[kind].title} {build.runtime_version}")
        here.append(f"{RUNTIMES[kind].title} {machine.runtime_version}")
    if machine.compute_capability not in build.compute_capabilities:
        built.append(f"for compute capability {', '.join(build.compute_capabilities)}")
        here.append(f"compute capability {machine.compute_capability}")
    if build.platform != machine.platform:
        built.append(f"on {build.platform}")
        here.append(machine.platform)
    if built:
        batches = " ".join(str(profile.opt) for profile in build.profiles)
        raise BackendError(
            f"the plan {artifact.path} was built {' '.join(built)}, but this machine has "
            f"{' with '.join(here)}; build it here with `maskrcnn export CHECKPOINT -o BUNDLE "
            f"--engine {kind} --precision {artifact.precision} --batch {batches}`"
        )


def _import_module(name: str, runtime: Runtime) -> ModuleType:
    install = f'pip install "maskrcnn-trt[{runtime.extra}]"'
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise BackendError(f"{missing} is not installed; install it with {install}") from None
    except (ImportError, OSError) as error:
        raise BackendError(
            f"cannot import {name} ({error}); install an NVIDIA driver if nvidia-smi finds no GPU, "
            f"else reinstall the package with {install}"
        ) from None

"""Checks that TensorRT plans can run on this machine. Each error names a remedy."""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ...model.bundle.manifest import (
    Artifact,
    EngineBuild,
    EngineKind,
    current_platform,
)
from ..errors import BackendError
from .base import import_errors
from .gpu_execution import load_driver


class Runtime(NamedTuple):
    """Library that runs the plans of one engine kind: TensorRT or TensorRT-RTX."""

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

# Remedies for TensorRT's errors, by a regular expression that is searched in the error message.
_REMEDIES: Final = {
    r"out\s?of\s?memory|insufficient memory": _FREE_MEMORY,
    r"find plugin|plugin\S* not found|plugin creator": "export the engine again with this version "
    "of maskrcnn-trt, which embeds the plugins",
}


class PlanTarget(NamedTuple):
    """Properties of a machine that decide which TensorRT or TensorRT-RTX plans run on it."""

    # Version of TensorRT or TensorRT-RTX.
    runtime_version: str
    # Compute capability of the GPU, such as `9.0`.
    compute_capability: str
    # Operating system and architecture, such as `linux-x86_64`.
    platform: str
    # Free GPU memory in bytes.
    free_memory: int
    # Name of the GPU, such as `NVIDIA H100 80GB HBM3`.
    gpu_name: str
    # CUDA version that the driver supports, such as 13000 for 13.0.
    cuda_version: int


def probe_machine(kind: EngineKind) -> PlanTarget:
    """Return the properties of this machine that a plan (engine file) must match to run on it.

    They include the GPU's compute capability, and the version of TensorRT or, if `kind` is
    `tensorrt-rtx`, of TensorRT-RTX.

    Raises:
        BackendError: the machine has no GPU, or a Python module or CUDA's driver cannot be loaded.
    """
    runtime = RUNTIMES[kind]
    with import_errors(runtime.module, runtime.extra):
        trt: Any = importlib.import_module(runtime.module)
    with import_errors("CUDA's driver", runtime.extra):
        driver = load_driver()
    with driver.current():
        return PlanTarget(
            runtime_version=trt.__version__,
            compute_capability=driver.compute_capability(),
            platform=current_platform(),
            free_memory=driver.free_memory(),
            gpu_name=driver.gpu_name(),
            cuda_version=driver.cuda_version(),
        )


def check_plans(
    kind: EngineKind, artifacts: Sequence[Artifact], machine: PlanTarget, plan_bytes: int
) -> None:
    """Check that plans can run on a machine, without loading them.

    Args:
        kind: Engine kind of the plans: `tensorrt` or `tensorrt-rtx`.
        artifacts: Manifest entries of the plans. All these plans are to be loaded together.
        machine: Properties of the machine, from `probe_machine`.
        plan_bytes: Total size of the plan files in bytes. The plans need at least as much GPU
            memory.

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
            f"the plans need {needed / 2**20:.0f} MiB of GPU memory, but only "
            f"{free / 2**20:.0f} MiB are free; {_FREE_MEMORY}"
        )


def remedy_from_reason(reason: str) -> str | None:
    """Return the remedy for an error message that TensorRT logged. None: no remedy is known."""
    return next((r for p, r in _REMEDIES.items() if re.search(p, reason, re.IGNORECASE)), None)


def _check_build(kind: EngineKind, artifact: Artifact, machine: PlanTarget) -> None:
    build = artifact.engine
    assert build is not None  # guaranteed by the manifest
    if build.stripped:
        raise BackendError(
            f"the plan {artifact.path} has no weights; insert them on this machine with "
            "`maskrcnn engine refit BUNDLE`"
        )
    built, here = [], []
    if not _loads(build, machine.runtime_version):
        built.append(f"with {RUNTIMES[kind].title} {build.runtime_version}")
        here.append(f"{RUNTIMES[kind].title} {machine.runtime_version}")
    if not _runs_on(build, machine.compute_capability):
        built.append(f"for compute capability {', '.join(build.compute_capabilities)}")
        here.append(f"compute capability {machine.compute_capability}")
    if build.platform != machine.platform:
        built.append(f"on {build.platform}")
        here.append(f"platform {machine.platform}")
    if built:
        batches = " ".join(str(profile.opt) for profile in build.profiles)
        raise BackendError(
            f"the plan {artifact.path} was built {' '.join(built)}, but this machine has "
            f"{', '.join(here)}; build it here with `maskrcnn export CHECKPOINT -o BUNDLE "
            f"--engine {kind} --precision {artifact.precision} --batch {batches}`"
        )
    if (build.ptx_cuda_version or 0) > machine.cuda_version:
        raise BackendError(
            f"the plan {artifact.path} contains PTX {build.ptx_version}, which needs a driver for "
            f"CUDA {_version_text(build.ptx_cuda_version)}, but this machine's driver supports "
            f"CUDA {_version_text(machine.cuda_version)}; update the NVIDIA driver, or export the "
            "engine again after `pip install "
            f'"nvidia-cuda-nvrtc<{_version_text(machine.cuda_version + 10)}"`'
        )


def gpu_warning(artifact: Artifact, gpu_name: str) -> str:
    """Return a warning if a plan was built on a GPU with a name other than `gpu_name`, else ""."""
    build = artifact.engine
    if build is None or build.gpu_name in (None, gpu_name):
        return ""
    return (
        f"the plan {artifact.path} was built on {build.gpu_name}, and this GPU is {gpu_name}; a "
        "plan that is built here with `maskrcnn export --engine tensorrt` may be faster"
    )


def _loads(build: EngineBuild, version: str) -> bool:
    if not build.version_compatible:
        return build.runtime_version == version
    numbers = [[int(part) for part in v.split(".")[:2]] for v in (build.runtime_version, version)]
    return numbers[0] <= numbers[1]


def _runs_on(build: EngineBuild, capability: str) -> bool:
    if build.hardware_compatibility == "ampere-plus":
        return int(capability.partition(".")[0]) >= 8
    return capability in build.compute_capabilities


def _version_text(version: int | None) -> str:
    """Return a CUDA version as text: `13.0` for 13000, and "" for None."""
    return "" if version is None else f"{version // 1000}.{version % 1000 // 10}"

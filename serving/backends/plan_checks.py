"""Whether plans run on a machine: facts in, sentences out. Needs neither GPU nor TensorRT."""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ...model.manifest import Artifact, BatchProfile, EngineKind
from ..errors import BackendError
from .base import batch_sizes


class Runtime(NamedTuple):
    """What loads plans of a kind."""

    title: str
    module: str
    """Python module."""
    extra: str
    """Extra of this package that installs it."""


RUNTIMES: Final[Mapping[EngineKind, Runtime]] = {
    "tensorrt": Runtime("TensorRT", "tensorrt", "tensorrt"),
    "tensorrt-rtx": Runtime("TensorRT-RTX", "tensorrt_rtx", "rtx"),
}

RTX_MAJORS: Final = ("7", "8", "12")
"""Major compute capabilities that TensorRT-RTX runs on."""

_FREE_MEMORY: Final = (
    "end what holds the GPU's memory (nvidia-smi lists it), lower --max-batch or serve a lower "
    "--precision"
)

_REMEDIES: Final = {
    r"out\s?of\s?memory|insufficient memory": _FREE_MEMORY,
    r"find plugin|plugin\S* not found|plugin creator": "export the engine again with this version "
    "of maskrcnn-trt, which puts the plugins inside",
}
"""What mends a fault, by what TensorRT says of it."""


class Machine(NamedTuple):
    """What decides which plans of a kind run here."""

    runtime_version: str
    """Version of the kind's runtime."""
    compute_capability: str
    """That of the GPU, as in `9.0`."""
    platform: str
    """Operating system and machine, as in `linux-x86_64`."""
    free_memory: int
    """Bytes of GPU memory that nobody holds."""


def check_plans(
    kind: EngineKind, artifacts: Sequence[Artifact], machine: Machine, plan_bytes: int
) -> None:
    """Refuse plans that their manifest says do not run on a machine.

    Args:
        kind: Kind of the artefacts.
        artifacts: Plans that are to be loaded together.
        machine: Where.
        plan_bytes: Size of their files, which is the least that they take of the GPU's memory.

    Raises:
        BackendError: they do not; the message says why, and what mends it.
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
    """Refuse what does not fit into the GPU's memory.

    Raises:
        BackendError: fewer bytes are free than needed.
    """
    if needed > free:
        raise BackendError(
            f"the plans need {needed / 2**20:.0f} MiB of GPU memory and {free / 2**20:.0f} MiB are "
            f"free; {_FREE_MEMORY}"
        )


def remedy_from_reason(reason: str) -> str | None:
    """What mends a fault that TensorRT logged, where that is known."""
    return next((r for p, r in _REMEDIES.items() if re.search(p, reason, re.IGNORECASE)), None)


def batch_profiles(profiles: Sequence[BatchProfile], max_batch: int) -> dict[int, int]:
    """Batch sizes to run a plan at, each with the optimisation profile that suits it best.

    Sizes are those of `batch_sizes`, but for what the plan does not take.

    Args:
        profiles: Of the plan, by index.
        max_batch: Largest batch that will come.

    Returns:
        Index of the profile by batch size, ascending.

    Raises:
        BackendError: the largest batch is larger than every profile.
    """
    largest = max(profile.max for profile in profiles)
    if max_batch > largest:
        raise BackendError(
            f"--max-batch is {max_batch}, but the plan takes at most {largest} images at once; "
            f"lower it to {largest}, or export the engine with `--batch {max_batch}`"
        )
    chosen: dict[int, int] = {}
    for size in batch_sizes(max_batch):
        fitting = [index for index, profile in enumerate(profiles) if profile.max >= size]
        best = min(fitting, key=lambda i: (profiles[i].min > size, profiles[i].max))
        chosen[max(size, profiles[best].min)] = best
    return chosen


def _check_build(kind: EngineKind, artifact: Artifact, machine: Machine) -> None:
    build = artifact.engine
    assert build is not None  # the manifest sees to it
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
            f"the plan {artifact.path} was built {' '.join(built)}, and here is "
            f"{' with '.join(here)}; build it here with `maskrcnn export CHECKPOINT -o BUNDLE "
            f"--engine {kind} --precision {artifact.precision} --batch {batches}`"
        )

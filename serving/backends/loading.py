"""The choice of a backend."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ...model.manifest import ArtifactKind, Manifest, Precision
from ..config import BackendName
from ..errors import BackendError
from .base import Backend
from .machines import probe_machine
from .plan_checks import check_plans

_log = logging.getLogger(__name__)

_KINDS: Final[Mapping[BackendName, ArtifactKind]] = {
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt-rtx",
    "torch": "torch",
    "onnxruntime": "onnx",
}
"""What each backend loads, the fastest first."""


BACKENDS: Final = tuple(_KINDS)
"""The fastest first."""


class BackendChoice(NamedTuple):
    """The backend to compute with, and why."""

    backend: BackendName
    """One of `BACKENDS`."""
    faults: tuple[str, ...]
    """Why none of the faster ones that the bundle has artefacts for."""


def served_precision(manifest: Manifest, backend: BackendName) -> Precision:
    """The precision to serve where none is asked for: the bundle's first for the backend."""
    kind = _KINDS.get(backend)
    found = (a.precision for a in manifest.artifacts if kind in (None, a.kind))
    return next(found, manifest.precisions[0])


def load_backend(
    bundle: Path,
    manifest: Manifest,
    precision: Precision,
    name: BackendName = "auto",
    max_batch: int = 1,
) -> Backend:
    """The backend that computes a bundle in a precision.

    Args:
        bundle: The bundle's folder.
        manifest: Its manifest.
        precision: One of the manifest's.
        name: The backend; `auto` takes the fastest that the bundle has artefacts for and that runs
            here, and logs why no faster one does.
        max_batch: Largest batch that will come.

    Raises:
        BundleError: the bundle is damaged or lacks the precision.
        BackendError: the backend does not run here, or not with such batches.
    """
    choice = choose_backend(bundle, manifest, precision, name)
    if name == "auto":
        _log_choice(choice)
    kind = _KINDS[choice.backend]
    # Imported when chosen: a backend may need what another install does not have.
    if kind == "onnx":
        from .onnxruntime import OnnxRuntimeBackend

        return OnnxRuntimeBackend(bundle, manifest, precision)
    if kind == "torch":
        return _torch_backend(bundle, manifest, precision, max_batch)
    from .tensorrt import TensorRTBackend

    return TensorRTBackend(bundle, manifest, precision, kind, max_batch)


def _torch_backend(
    bundle: Path, manifest: Manifest, precision: Precision, max_batch: int
) -> Backend:
    try:
        from .torch import TorchBackend
    except ModuleNotFoundError as error:
        raise _missing_for_torch(error) from None
    return TorchBackend(bundle, manifest, precision, max_batch)


def _missing_for_torch(error: ModuleNotFoundError) -> BackendError:
    return BackendError(
        f'{error.name} is not installed; install it with pip install "maskrcnn-trt[torch]"'
    )


def choose_backend(
    bundle: Path, manifest: Manifest, precision: Precision, name: BackendName
) -> BackendChoice:
    """What `load_backend` loads for the same arguments; raises as it does before it loads."""
    if name != "auto":
        if name != "torch":  # it also runs without a GPU, but slowly
            check_backend(bundle, manifest, precision, name)
        return BackendChoice(name, ())
    faults: list[str] = []
    for candidate, kind in _KINDS.items():
        if not any((a.precision, a.kind) == (precision, kind) for a in manifest.artifacts):
            continue
        try:
            check_backend(bundle, manifest, precision, candidate)
        except BackendError as error:
            faults.append(f"{candidate}: {error}")
        else:
            return BackendChoice(candidate, tuple(faults))
    if faults:
        raise BackendError("; ".join(faults))
    return BackendChoice("onnxruntime", ())


def _log_choice(choice: BackendChoice) -> None:
    name, faults = choice
    if faults:
        _log.warning("computing with %s, as nothing faster runs: %s", name, "; ".join(faults))
    else:
        _log.info("computing with %s", name)


def check_backend(
    bundle: Path, manifest: Manifest, precision: Precision, name: BackendName
) -> None:
    """Refuse a backend other than auto that does not run here, or not as fast as it is to.

    Raises:
        BundleError: the bundle has nothing for it in the precision.
        BackendError: what it has does not run on this machine.
    """
    kind = _KINDS[name]
    artifacts = manifest.artifacts_for(precision, kind)
    if kind == "onnx":
        return
    if kind == "torch":
        _check_torch()
        return
    paths = [bundle / artifact.path for artifact in artifacts]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    check_plans(kind, artifacts, probe_machine(kind), size)


def _check_torch() -> None:
    """Refuse to compute with torch where it is not, or finds no GPU."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise _missing_for_torch(error) from None
    if not torch.cuda.is_available():
        raise BackendError(
            "torch finds no NVIDIA GPU; find out why with nvidia-smi, or compute on the CPU with "
            "--backend onnxruntime, or with --backend torch, which is slower but has bf16"
        )

"""Selection and loading of a bundle's inference backend, and check of ONNX Runtime's packages."""

import logging
import os
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...model.bundle.manifest import ArtifactKind, Manifest, Precision
from ..config import BackendName
from ..errors import BackendError
from .base import Backend, import_errors
from .plan_checks import check_plans, probe_machine

if TYPE_CHECKING:
    from .tensorrt import TensorRTBackend

_log = logging.getLogger(__name__)

# Kind of model file that each backend runs, in the order in which `auto` tries the backends. torch
# comes first, because it is the fastest backend that has been measured. TensorRT engines have not
# been measured.
_KINDS: Final[Mapping[BackendName, ArtifactKind]] = {
    "torch": "torch",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt-rtx",
    "onnxruntime": "onnx",
}

# Number of hardware queues of a CUDA context. CUDA's default is 8. Streams that share a queue wait
# for one another. nvJPEG decodes each JPEG in a separate stream, so with few queues, decoding the
# next batch would wait until the model has computed the previous one.
_HARDWARE_QUEUES: Final = 32

# Names of all backends, in the order in which `auto` tries them.
BACKENDS: Final = tuple(_KINDS)

_ONNXRUNTIME_PACKAGES: Final = ("onnxruntime", "onnxruntime-gpu")
_INSTALL_ONNXRUNTIME: Final = (
    'pip install "maskrcnn-trt[cpu]", or with an NVIDIA GPU pip install "maskrcnn-trt[gpu]"'
)


class BackendChoice(NamedTuple):
    """Selected backend, and the reasons why backends of higher priority cannot run."""

    # One of `BACKENDS`.
    backend: BackendName
    # `NAME: MESSAGE` of each skipped backend for which the bundle has model files.
    faults: tuple[str, ...]


def served_precision(manifest: Manifest, backend: BackendName) -> Precision:
    """Return the precision that is served if the user requests none.

    It is the precision of the first model file for this backend in the manifest. For `auto`, or if
    there is no such file, it is the precision of the first model file for any backend.
    """
    kind = _KINDS.get(backend)
    found = (a.precision for a in manifest.artifacts if kind in (None, a.kind))
    return next(found, manifest.precisions[0])


def describe_model(bundle: Path, manifest: Manifest, precision: Precision) -> str:
    """Return `NAME-PRECISION (BUNDLE)`, for log messages about one precision of a model."""
    return f"{manifest.model_name}-{precision} ({bundle})"


def load_backend(
    bundle: Path,
    manifest: Manifest,
    precision: Precision,
    name: BackendName = "auto",
    max_batch: int = 1,
) -> Backend:
    """Load the backend for one precision of a bundle.

    Args:
        bundle: Folder of the bundle.
        manifest: Manifest of the bundle.
        precision: One of the manifest's precisions.
        name: The backend. `auto`: the first of `BACKENDS` that runs on this machine and for which
            the bundle has model files. If earlier entries of `BACKENDS` have model files but cannot
            run, a warning with the reasons is logged.
        max_batch: Maximum batch size.

    Raises:
        BundleError: the bundle is damaged, or has no model file for the precision and backend.
        BackendError: the backend is unknown, does not run on this machine, or does not support
            `max_batch`, or memory runs out.
    """
    # CUDA reads this variable only once, when the process first uses CUDA.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(_HARDWARE_QUEUES))
    choice = choose_backend(bundle, manifest, precision, name)
    kind = _KINDS[choice.backend]
    manifest.artifacts_for(precision, kind)  # raises an error if there are none
    if choice.faults:
        _log.warning(
            "using backend %s for %s; backends of higher priority cannot run: %s",
            choice.backend,
            describe_model(bundle, manifest, precision),
            "; ".join(choice.faults),
        )
    elif name == "auto":
        model = describe_model(bundle, manifest, precision)
        _log.info("using backend %s for %s", choice.backend, model)
    # Lazy imports: each backend needs packages that are installed only for it.
    if kind == "onnx":
        from .onnxruntime import OnnxRuntimeBackend

        if problem := check_onnxruntime():
            _log.warning("%s", problem)
        return OnnxRuntimeBackend(bundle, manifest, precision)
    if kind == "torch":
        with import_errors("torch", "torch"):
            from .torch import TorchBackend
        return TorchBackend(bundle, manifest, precision, max_batch)
    return _tensorrt_backend()(bundle, manifest, precision, kind, max_batch)


def _tensorrt_backend() -> "type[TensorRTBackend]":
    """Return the class of the TensorRT backend.

    If torch finds a GPU and torchvision is installed, return the subclass that also accepts batches
    of torch tensors on the GPU.
    """
    from .tensorrt import TensorRTBackend

    if find_spec("torchvision") is None:
        return TensorRTBackend
    try:
        import torch

        from .tensorrt import TensorRTDeviceBackend
    except (ImportError, OSError):  # OSError: a library of CUDA is missing
        return TensorRTBackend
    return TensorRTDeviceBackend if torch.cuda.is_available() else TensorRTBackend


def choose_backend(
    bundle: Path, manifest: Manifest, precision: Precision, name: BackendName
) -> BackendChoice:
    """Return the backend that `load_backend` would load, without loading it.

    If `name` is `torch`, neither the machine nor the bundle's model files are checked.

    Raises:
        BundleError: `name` is neither `auto` nor `torch`, and the bundle has no model file for the
            backend in the precision.
        BackendError: `name` is neither `auto` nor one of `BACKENDS`, or the backend does not run on
            this machine. If `name` is `auto`: the bundle has model files for some backends, but
            none of these backends runs on this machine.
    """
    if name != "auto" and name not in _KINDS:
        raise BackendError(f"there is no backend {name!r}; choose from auto, {', '.join(_KINDS)}")
    if name != "auto":
        if name != "torch":  # torch also runs on the CPU, which `check_backend` would reject
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
        raise BackendError(f"no backend can run the bundle: {'; '.join(faults)}")
    return BackendChoice("onnxruntime", ())


def check_backend(
    bundle: Path, manifest: Manifest, precision: Precision, name: BackendName
) -> None:
    """Check that a backend can run a bundle on this machine.

    Without a GPU, the check of `torch` fails, although this backend can run on the CPU.

    Args:
        bundle: Folder of the bundle.
        manifest: Manifest of the bundle.
        precision: One of the manifest's precisions.
        name: The backend, not `auto`.

    Raises:
        BundleError: the bundle has no model file for the backend in the precision.
        BackendError: a package or a GPU is missing, or TensorRT plans do not run on this machine.
    """
    kind = _KINDS[name]
    artifacts = manifest.artifacts_for(precision, kind)
    if kind == "onnx":
        check_onnxruntime()
        return
    if kind == "torch":
        _check_torch(precision)
        return
    paths = [bundle / artifact.path for artifact in artifacts]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    check_plans(kind, artifacts, probe_machine(kind), size)


def _check_torch(precision: Precision) -> None:
    with import_errors("torch", "torch"):
        import torch
    if not torch.cuda.is_available():
        # ONNX Runtime is faster on a CPU, but does not compute in bf16.
        other = "torch" if precision == "bf16" else "onnxruntime"
        raise BackendError(
            "torch finds no NVIDIA GPU; check nvidia-smi, or compute on the CPU with --backend "
            f"{other}"
        )
    with import_errors("torchvision", "torch"):
        import torchvision  # noqa: F401


def check_onnxruntime() -> str:
    """Check that exactly one of the packages `onnxruntime` and `onnxruntime-gpu` is installed.

    Returns:
        If both are installed, a warning that contains the commands for repair; otherwise "".

    Raises:
        BackendError: ONNX Runtime is not installed, or its files are missing.
    """
    installed = [name for name in _ONNXRUNTIME_PACKAGES if any(metadata.distributions(name=name))]
    # If both were installed and one is uninstalled, empty folders remain. Python takes them for a
    # namespace package, whose `origin` is None.
    spec = find_spec("onnxruntime")
    if spec is None or (spec.origin is None and not installed):
        raise BackendError(f"onnxruntime is not installed; install it with {_INSTALL_ONNXRUNTIME}")
    repair = (
        f"run pip uninstall --yes {' '.join(_ONNXRUNTIME_PACKAGES)}, then {_INSTALL_ONNXRUNTIME}"
    )
    if spec.origin is None:
        raise BackendError(f"the files of {installed[0]} are missing; {repair}")
    if len(installed) > 1:
        return f"{' and '.join(installed)} overwrite each other's files; {repair}"
    return ""

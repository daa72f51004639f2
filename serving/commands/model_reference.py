"""Resolution of model references (paths or model names) to bundles with artifacts for a backend."""

from collections.abc import Sequence
from pathlib import Path

from ...model.bundle.manifest import MANIFEST_NAME, Precision
from ...model.bundle.spec import ShapeBucket
from ...model.weights.bundle_cache import bundle_from_reference
from ..config import BackendName
from ..host import gpu_names


def bundle_for_backend(
    reference: str | Path,
    backend: BackendName,
    precisions: Sequence[Precision] = (),
    buckets: Sequence[ShapeBucket] = (),
) -> Path:
    """Return the bundle of a model reference. A checkpoint or a named model is exported first.

    Args:
        reference: Model reference; see `bundle_from_reference`. The path of a bundle's manifest
            stands for the bundle.
        backend: Backend that will run the bundle. `auto`: torch if the machine has an NVIDIA GPU,
            ONNX Runtime otherwise.
        precisions: Precisions to export. Empty: fp32.
        buckets: Input sizes to export. Empty: the model's own input sizes.

    Raises:
        ZooError: No published model has this name, or this package does not support the model.
        DownloadError: The download failed, or the checksum of the downloaded file is wrong.
        click.exceptions.Exit: The export failed. Its error message is on standard error.
    """
    path = Path(reference)
    if path.name == MANIFEST_NAME:
        path = path.parent
    if path.is_dir():
        return path
    engines: tuple[str, ...] = () if backend == "onnxruntime" else (backend,)
    if backend == "auto":
        engines = ("torch",) if gpu_names() else ()
    return bundle_from_reference(reference, precisions or ("fp32",), engines, buckets)

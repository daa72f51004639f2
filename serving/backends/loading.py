"""The choice of a backend."""

from pathlib import Path

from ...model.manifest import Manifest, Precision
from .base import Backend


def load_backend(bundle: Path, manifest: Manifest, precision: Precision) -> Backend:
    """The backend that computes a bundle in a precision.

    Raises:
        BundleError: the bundle is damaged or lacks the precision.
    """
    # Imported when chosen: a backend may need what another install does not have.
    from .onnxruntime import OnnxRuntimeBackend

    return OnnxRuntimeBackend(bundle, manifest, precision)

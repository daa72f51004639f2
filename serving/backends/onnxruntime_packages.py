"""Check of ONNX Runtime's CPU and GPU packages, which overwrite each other's files."""

from importlib import metadata
from importlib.util import find_spec
from typing import Final

from ..errors import BackendError

_PACKAGES: Final = ("onnxruntime", "onnxruntime-gpu")
_INSTALL: Final = (
    'pip install "maskrcnn-trt[cpu]", or with an NVIDIA GPU pip install "maskrcnn-trt[gpu]"'
)


def check_onnxruntime() -> str:
    """Check that one of ONNX Runtime's two packages, for CPU or GPU, is installed.

    Returns:
        Warning with the problem and its repair if both packages are installed, else an empty text.

    Raises:
        BackendError: ONNX Runtime is not installed, or its files are missing.
    """
    installed = [name for name in _PACKAGES if any(metadata.distributions(name=name))]
    # If both were installed and one is uninstalled, empty folders remain. Python takes them for a
    # namespace package, whose `origin` is None.
    spec = find_spec("onnxruntime")
    if spec is None or (spec.origin is None and not installed):
        raise BackendError(f"onnxruntime is not installed; install it with {_INSTALL}")
    repair = f"run pip uninstall --yes {' '.join(_PACKAGES)}, then {_INSTALL}"
    if spec.origin is None:
        raise BackendError(f"the files of {installed[0]} are missing; {repair}")
    if len(installed) > 1:
        return f"{' and '.join(installed)} overwrite each other's files; {repair}"
    return ""

"""List of all CUDA kernels, used by tests and by `maskrcnn kernels build`."""

import importlib
from pathlib import Path

from .runtime.compilation import Kernel


def all_kernels() -> tuple[Kernel, ...]:
    """Return the `PREBUILT_KERNELS` of all operations.

    They include all kernels of the default model configuration, and some for other settings.
    """
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/kernel.py"))
    return tuple(
        kernel
        for folder in folders
        for kernel in importlib.import_module(f".{folder}.kernel", __package__).PREBUILT_KERNELS
    )

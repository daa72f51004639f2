"""CUDA kernels: a `.cu` file each, and beside it the module that compiles and launches it."""

import importlib
import pkgutil

from ..compilation import Kernel


def all_kernels() -> tuple[Kernel, ...]:
    """Every kernel: what the default model needs with channels last, and a choice of the rest."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(
        kernel
        for name in modules
        for kernel in importlib.import_module(f"{__name__}.{name}").VARIANTS
    )

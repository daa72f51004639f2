"""CUDA kernels: a `.cu` file each, and beside it the module that compiles and launches it."""

import importlib
import pkgutil

from ..compilation import Kernel


def all_kernels() -> tuple[Kernel, ...]:
    """Every kernel in the variants that the models need, by name of the module."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(
        kernel
        for name in modules
        for kernel in importlib.import_module(f"{__name__}.{name}").VARIANTS
    )

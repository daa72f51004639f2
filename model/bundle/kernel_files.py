"""Compiled kernels of a compiled program, copied from the user's caches to a bundle and back.

A compiled program contains the kernels that torch generates. When it first runs, it compiles
further kernels: the CUDA kernels of `plugins`, and Triton kernels within custom operations. Their
compilation would take most of the time of a first start.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from ...plugins.runtime.user_cache import cache_folder, write_cached

# Triton's files that a process needs to run a kernel. The others contain intermediate code.
_SUFFIXES = {".cubin", ".json", ".so"}
# Triton's files that list all files of a kernel with their absolute paths begin with this prefix.
_LIST_PREFIX = "__grp__"
# Stands for Triton's cache folder in these files.
_FOLDER = b"[TRITON_CACHE_DIR]"


def cached_kernels(device: torch.device) -> dict[str, bytes]:
    """Return the compiled kernels that this package's cache and Triton's cache contain.

    The names are `nvrtc/FILE` and `triton/KEY/FILE`. `device` is a GPU with its index.
    """
    nvrtc, triton = _folders(device)
    files = {f"nvrtc/{path.name}": path.read_bytes() for path in nvrtc.glob("*") if path.is_file()}
    for path in triton.glob("*/*"):
        if path.suffix in _SUFFIXES and path.is_file():
            content = path.read_bytes()
            if path.name.startswith(_LIST_PREFIX):
                content = content.replace(str(triton).encode(), _FOLDER)
            files[f"triton/{path.parent.name}/{path.name}"] = content
    return files


def restore_kernels(kernels: Mapping[str, bytes], device: torch.device) -> None:
    """Write compiled kernels that are not in the caches into them.

    If a cache cannot be written, do nothing: its kernels are then compiled when they first run.

    Args:
        kernels: result of `cached_kernels` in a process with the same versions of torch and Python,
            for a GPU of the same compute capability.
        device: GPU with its index.
    """
    nvrtc, triton = _folders(device)
    # Inductor sets this variable when it loads its first Triton kernel, which may come later.
    os.environ.setdefault("TRITON_CACHE_DIR", str(triton))
    # Lists come last: if the process ends before, Triton does not find an incomplete kernel.
    for name in sorted(kernels, key=lambda name: Path(name).name.startswith(_LIST_PREFIX)):
        cache, file = name.split("/", 1)
        path = (nvrtc if cache == "nvrtc" else triton) / file
        if not path.exists():
            write_cached(path, kernels[name].replace(_FOLDER, str(triton).encode()))


def _folders(device: torch.device) -> tuple[Path, Path]:
    """Return the cache folder of CUDA kernels, and that of Triton kernels for a GPU."""
    return cache_folder("kernels"), Path(triton_cache_dir(device.index))

"""Copying of compiled GPU kernels from the user's kernel caches, and back into them.

A compiled program contains the kernels that torch generates. On its first run, further kernels are
compiled: the CUDA kernels of `plugins`, and Triton kernels within custom operations. This
compilation would take most of a server's first start, so these kernels are stored, too.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from ...plugins.runtime.user_cache import cache_folder, write_cached

# Triton's files that a process needs to run a kernel. The others contain intermediate code.
_SUFFIXES = {".cubin", ".json", ".so"}
# Name prefix of Triton's lists, each of which has the absolute paths of all files of a kernel.
_LIST_PREFIX = "__grp__"
# Placeholder for the path of Triton's cache folder in stored lists.
_FOLDER = b"[TRITON_CACHE_DIR]"


def cached_kernels(device: torch.device) -> dict[str, bytes]:
    """Return the compiled kernels that this package's cache and Triton's cache contain.

    The result maps names of the form `nvrtc/FILE` or `triton/KEY/FILE` to the contents of the
    files. `device` is a GPU with its index.
    """
    nvrtc, triton = _folders(device)
    files = {f"nvrtc/{path.name}": path.read_bytes() for path in nvrtc.glob("*") if path.is_file()}
    for path in triton.glob("*/*"):
        if path.suffix in _SUFFIXES and path.is_file():
            content = path.read_bytes()
            if path.name.startswith(_LIST_PREFIX):
                content = content.replace(_as_json(triton), _FOLDER)
            files[f"triton/{path.parent.name}/{path.name}"] = content
    return files


def restore_kernels(kernels: Mapping[str, bytes], device: torch.device) -> None:
    """Write compiled kernels to the kernel caches, unless the caches contain them already.

    If a cache cannot be written, do nothing. Its kernels are then compiled on first use.

    Args:
        kernels: result of `cached_kernels` in a process with the same versions of torch and Python,
            for a GPU of the same compute capability.
        device: GPU with its index.
    """
    nvrtc, triton = _folders(device)
    # Inductor sets this variable when it loads its first Triton kernel, which may come later.
    os.environ.setdefault("TRITON_CACHE_DIR", str(triton))
    files_of: dict[Path, list[Path]] = defaultdict(list)
    lists: dict[Path, bytes] = {}
    for name, content in kernels.items():
        cache, file = name.split("/", 1)
        path = (nvrtc if cache == "nvrtc" else triton) / file
        if path.name.startswith(_LIST_PREFIX):
            lists[path] = content.replace(_FOLDER, _as_json(triton))
        else:
            files_of[path.parent].append(path)
            _write_missing(path, content)
    # Triton fails if a listed file is missing. Therefore, write a list only after all its files.
    for path, content in lists.items():
        if all(map(os.path.exists, files_of[path.parent])):
            _write_missing(path, content)


def _write_missing(path: Path, content: bytes) -> None:
    # `Path.exists` raises an error if the folder is not accessible.
    if not os.path.exists(path):
        write_cached(path, content)


def _as_json(path: Path) -> bytes:
    return json.dumps(str(path))[1:-1].encode()


def _folders(device: torch.device) -> tuple[Path, Path]:
    """Return two cache folders: of CUDA kernels, and of Triton kernels for the GPU `device`."""
    return cache_folder("kernels"), Path(triton_cache_dir(device.index))

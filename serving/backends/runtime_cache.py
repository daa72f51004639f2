"""What TensorRT-RTX compiled for the GPU at hand, kept from one process to the next."""

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...plugins.user_cache import cache_folder, store


def cache_path(plan_hashes: Iterable[str]) -> Path:
    """Where the user's cache folder keeps what was compiled for plans of these SHA-256."""
    digest = hashlib.sha256("\n".join(plan_hashes).encode()).hexdigest()
    return cache_folder("tensorrt-rtx") / digest


class RuntimeCache:
    """The runtime cache that the engines of a backend share.

    It is no more than a saving of time: TensorRT-RTX refuses what was compiled for another machine
    or version and compiles again, and a file that cannot be written is not.
    """

    def __init__(self, path: Path) -> None:
        """Keep the cache in a file, which need not exist."""
        self._path = path
        self._cache: Any = None

    def config_for(self, engine: Any) -> Any:
        """A runtime configuration for an `ICudaEngine` with the cache in it; the GPU is current."""
        config = engine.create_runtime_config()
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            with contextlib.suppress(OSError):
                self._cache.deserialize(self._path.read_bytes())
        config.set_runtime_cache(self._cache)
        return config

    def store(self) -> None:
        """Write the file, whole or not at all."""
        store(self._path, bytes(self._cache.serialize()))

"""Files in the user's cache folder. Any file may be deleted at any time."""

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder(subject: str) -> Path:
    """Return `$XDG_CACHE_HOME/maskrcnn-trt/SUBJECT`.

    If XDG_CACHE_HOME is not set, return `~/.cache/maskrcnn-trt/SUBJECT`. The folder may not exist
    yet.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "maskrcnn-trt" / subject


def write_cached(path: Path, content: bytes) -> None:
    """Write a cache file atomically. If it cannot be written, do nothing."""
    # An error need not be reported: without the file, its content is computed again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder, path.name)
            draft.write_bytes(content)
            draft.replace(path)

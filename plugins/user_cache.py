"""Files kept in the user's cache folder to save time; any of them may be deleted at any time."""

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder(subject: str) -> Path:
    """`$XDG_CACHE_HOME/maskrcnn-trt/<subject>`, or the same in `~/.cache`; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "maskrcnn-trt" / subject


def store(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; a cache that cannot be written costs time only."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder, path.name)
            draft.write_bytes(content)
            draft.replace(path)

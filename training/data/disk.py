"""Care for large files: room for them, one writer each, and what they hold."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from .coco import DataError

_CHUNK = 1 << 20

ByteProgress = Callable[[str, int, int | None], object]
"""Called with what is being done, such as `checking val2017.zip`, the bytes done, of how many."""


def no_progress(step: str, done: int, total: int | None) -> None:
    """Show nothing."""


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keep other processes from making the same file or folder; a process that dies lets go.

    Raises:
        DataError: another process is making it.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise DataError(f"another process is making {path}; wait until it is done") from None
    try:
        yield
    finally:
        lock.release()


def require_room(path: Path, needed: int) -> None:
    """See to it that a file or folder to be made fits on its disk.

    Args:
        path: what is to be made, in a folder that exists.
        needed: bytes.

    Raises:
        DataError: it does not fit.
    """
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise DataError(
            f"{path} needs {needed / 1e9:.1f} GB more, but its disk has only {free / 1e9:.1f} GB "
            "free; make room, or choose another folder"
        )


def md5_of(path: Path, step: str, on_progress: ByteProgress) -> str:
    """MD5 of a file in hexadecimal digits.

    Args:
        path: an existing file.
        step: what `on_progress` is to call this.
        on_progress: see `ByteProgress`.
    """
    digest, size = hashlib.md5(usedforsecurity=False), path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            on_progress(step, file.tell(), size)
    return digest.hexdigest()

"""Atomic file writes, and checks of output paths before a long computation."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

# Values of `errno` if a file cannot grow.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Context manager: open a binary file that replaces `path` at the end of the `with` block.

    During the block, the content is in the file `.NAME.ID.partial` in the same folder, where NAME
    is the name of `path`, cut to 32 characters, and ID is random. If the block raises an exception,
    the partial file is removed and `path` is unchanged. If `path` is a pipe or a device, the
    content is written to it directly.

    Args:
        path: The file to create or replace. Its folder must exist.
        durable: Whether to flush the file and its folder to the disk, so that the write survives a
            power loss.

    Raises:
        OSError: The file cannot be written.
    """
    if _is_written_directly(path):
        with path.open("wb") as file:
            yield file
        return
    # The ID gives concurrent writers different files. NAME is shortened, because a file name has at
    # most 255 bytes.
    partial = path.with_name(f".{path.name[:32]}.{uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            error.filename = str(path)  # a write error has no file name
        raise
    if durable:
        # The rename survives a power loss only after its folder is flushed too.
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_creatable(path: Path, suffix: str = "") -> None:
    """Check that a file or folder can be created or replaced at a path, without doing so.

    If `path` is a folder already, check that files can be created in it.

    Args:
        path: The path to check.
        suffix: Required end of the name, such as `.html`. It protects other files, such as
            checkpoints, from being overwritten by mistake. Empty: any name is allowed. Pipes and
            devices may always have any name.

    Raises:
        OSError: The file or folder cannot be created. `strerror` states the reason: an invalid
            name, or the existing folder or file that prevents it. `filename` is `path`.
    """
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        reason = "the path has a character that no file name can have"
        raise OSError(errno.EINVAL, reason, str(path))
    if not path.is_dir() and _is_written_directly(path):
        return
    parents = path.absolute().parents
    existing = next(p for p in (path, *parents) if os.path.exists(p))
    if existing == path and path.is_file():
        existing = parents[0]
    try:
        # Create a file, because permissions do not tell whether that works, as in /proc.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = f"no file can be created in {existing} ({error.strerror})"
        raise OSError(error.errno, reason, str(path)) from None
    if not path.name.lower().endswith(suffix):
        raise OSError(errno.EINVAL, f"the name does not end in {suffix}", str(path))


def _is_written_directly(path: Path) -> bool:
    """Return whether a path exists and must not be replaced by a partial file.

    This is the case for all paths in /dev and /proc, and for all but regular files elsewhere.
    """
    return path.exists() and (not path.is_file() or path.absolute().parts[1] in ("dev", "proc"))

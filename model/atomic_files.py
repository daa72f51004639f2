"""Atomic file writes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Context manager: open a binary file that replaces `path` at the end of the `with` block.

    During the block, the content is in the file `.NAME.ID.partial` in the same folder, where NAME
    is the name of `path`, cut to 32 characters, and ID is random. If the block raises an exception,
    the partial file is removed and `path` is unchanged. If `path` is a pipe or a device, the
    content is written to it directly.

    Args:
        path: The file to create or replace. Its folder must exist.
        durable: Flush the file and its folder to the disk, so that the file survives a power loss.

    Raises:
        OSError: The file cannot be written.
    """
    # Do not replace devices such as /dev/null, or the link /dev/stdout.
    if path.exists() and (not path.is_file() or path.absolute().parts[1] in ("dev", "proc")):
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
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if durable:
        # The rename survives a power loss only after its folder is flushed too.
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

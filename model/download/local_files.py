"""Local side of downloads: locks, free disk space and partially downloaded files."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from ..config.schema import FrozenConfig


class DownloadError(Exception):
    """A file cannot be downloaded or created, or is not the expected one."""


@contextmanager
def exclusive_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Context manager: hold the lock of a file or folder that the `with` block creates.

    Only one process at a time can hold it. The lock itself is the file `.NAME.lock` beside `path`,
    where NAME is the name of `path`.

    Args:
        path: File or folder that is locked. Its parent folder must exist.
        wait: Wait until no other process holds the lock.

    Raises:
        DownloadError: Another process holds the lock, and `wait` is False. Or the lock cannot be
            written.
    """
    # Imported here because the base install lacks filelock: it is not needed to serve a bundle.
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        held = lock.acquire(blocking=wait)
    except Timeout:
        raise DownloadError(
            f"another process is creating {path}; wait until it has ended"
        ) from None
    except OSError as error:
        raise DownloadError(
            f"cannot create {path}: {error.strerror}; make its folder writable, or choose another "
            "folder"
        ) from error
    with held:
        yield


def check_free_space(path: Path, needed: int) -> None:
    """Check that a new file or folder fits on its disk.

    Args:
        path: File or folder that the caller will create. Its parent folder must exist.
        needed: Required space in bytes.

    Raises:
        DownloadError: The disk has less free space.
    """
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise DownloadError(
            f"{path} needs {needed / 1e9:.1f} GB more, but its disk has only {free / 1e9:.1f} GB "
            "free; free some space, or choose another folder"
        )


class RemoteVersion(FrozenConfig):
    """Version of a remote file, from HTTP headers.

    A field is None if the server did not send the corresponding header. A weak entity tag counts as
    not sent.
    """

    etag: str | None = None
    """Strong entity tag: equal tags guarantee equal bytes."""
    last_modified: str | None = None
    """Header Last-Modified."""
    total: int | None = None
    """Size of the whole file in bytes."""

    @property
    def validator(self) -> str | None:
        """Value for the header If-Range, or None if neither `etag` nor `last_modified` is known."""
        return self.etag or self.last_modified

    def agrees_with(self, other: "RemoteVersion") -> bool:
        """Whether two versions have equal values of all headers that the server sent for both."""
        pairs = ((getattr(self, key), getattr(other, key)) for key in RemoteVersion.model_fields)
        return all(mine == theirs or None in (mine, theirs) for mine, theirs in pairs)


class PartialFile:
    """Partially downloaded file `NAME.partial`, with its `RemoteVersion` in `NAME.partial.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.partial")
        self._version_path = path.with_name(f"{path.name}.partial.json")

    @property
    def size(self) -> int:
        """Number of bytes downloaded so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def version(self) -> RemoteVersion:
        """Recorded version of the remote file; `RemoteVersion()` if none was recorded."""
        try:
            return RemoteVersion.model_validate_json(self._version_path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return RemoteVersion()

    def restart(self, version: RemoteVersion) -> None:
        """Empty the partial file, then record the version of the remote file."""
        # In this order, a crash in between cannot leave the old bytes with the new version.
        self.path.write_bytes(b"")
        self._version_path.write_text(version.model_dump_json())

    def publish(self, path: Path) -> None:
        """Flush the partial file to the disk, and rename it to `path`.

        The JSON file with the version of the remote file is deleted.
        """
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self.path.replace(path)
        self.remove()

    def remove(self) -> None:
        """Delete the partial file, and the JSON file with the version of the remote file."""
        self.path.unlink(missing_ok=True)
        self._version_path.unlink(missing_ok=True)

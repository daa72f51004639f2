"""What is made of files, and made anew when they change."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ..errors import ServingError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Renewed(Generic[T]):
    """The latest that could be made of files, which are looked at each time that it is needed."""

    def __init__(self, files: Sequence[Path], make: Callable[[], T]) -> None:
        """Make it for the first time.

        Args:
            files: What it is made of.
            make: Makes it, or raises a ServingError, as this does, too.
        """
        self._files = files
        self._make = make
        self._versions = self._look()
        self._value = make()

    def latest(self) -> T:
        """What is in force; if files are faulty since they changed, what was before."""
        versions = self._look()
        if versions != self._versions:
            self._versions = versions
            names = " and ".join(map(str, self._files))
            try:
                self._value = self._make()
            except ServingError as error:
                _log.error("%s changed, and what was there before stays in force: %s", names, error)
            else:
                _log.info("%s changed, and is in force", names)
        return self._value

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_version(path) for path in self._files]


def _version(path: Path) -> tuple[int, ...] | None:
    """What differs after a file was written or replaced; none if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size

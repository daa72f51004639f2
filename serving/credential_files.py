"""Bearer token files, and automatic reload of token and TLS files that change."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from .errors import ServingError

_log = logging.getLogger(__name__)

# Syntax of a bearer token: RFC 6750, section 2.1.
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")

T = TypeVar("T")


def read_tokens(path: Path) -> list[str]:
    """Read bearer tokens from a file with one token per line; `#` begins a comment.

    Raises:
        ServingError: the file cannot be read, or contains an invalid token or none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"cannot read the tokens in {path}: {error}") from None
    tokens = []
    for number, line in enumerate(lines, start=1):
        if not (token := line.partition("#")[0].strip()):
            continue
        if not _TOKEN.fullmatch(token):
            # The message does not quote the line, which may be a mistyped secret.
            raise ServingError(
                f"line {number} of {path} is not a valid token; write one token per line, of "
                "letters, digits and -._~+/"
            )
        tokens.append(token)
    if not tokens:
        raise ServingError(
            f"{path} contains no tokens; write one per line, or remove the setting that names it"
        )
    return tokens


class ReloadOnChange(Generic[T]):
    """Value that is loaded from files, and reloaded after one of them changes."""

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        """Load the value for the first time.

        Args:
            files: Files that the value depends on.
            load: Function that loads the value. It raises ServingError if a file is invalid.

        Raises:
            ServingError: a file is invalid.
        """
        self._files = files
        self._load = load
        self._versions = self._file_versions()
        self._value = load()

    def current(self) -> T:
        """Return the value. If a file has changed, reload the value first.

        If the changed file is invalid, log the error and return the previous value.
        """
        versions = self._file_versions()
        if versions != self._versions:
            self._versions = versions
            names = " and ".join(map(str, self._files))
            try:
                self._value = self._load()
            except ServingError as error:
                _log.error("cannot reload %s; the previous content stays in use: %s", names, error)
            else:
                _log.info("reloaded %s", names)
        return self._value

    def _file_versions(self) -> list[tuple[int, ...] | None]:
        return [_file_version(path) for path in self._files]


def _file_version(path: Path) -> tuple[int, ...] | None:
    """Return a key that changes when the file is written or replaced. None: no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size

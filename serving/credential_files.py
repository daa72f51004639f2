"""Bearer token files, and automatic reload of token and TLS files that change."""

import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from .errors import ServingError

_log = logging.getLogger(__name__)

# Syntax of a bearer token: RFC 6750, section 2.1.
TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")

T = TypeVar("T")


class NoTokensError(ServingError):
    """The token file does not exist, or contains no token."""


def read_tokens(path: Path) -> list[str]:
    """Read bearer tokens from a file with one token per line; `#` begins a comment.

    Raises:
        NoTokensError: the file does not exist, or contains no token.
        ServingError: the file cannot be read, or contains an invalid token.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError as error:
        raise NoTokensError(f"cannot read the tokens in {path}: {error.strerror}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"cannot read the tokens in {path}: {error}") from None
    tokens = []
    for number, line in enumerate(lines, start=1):
        if not (token := line.partition("#")[0].strip()):
            continue
        if not TOKEN.fullmatch(token):
            # The message does not quote the line, which may be a mistyped secret.
            raise ServingError(
                f"line {number} of {path} is not a valid token; write one token per line, of "
                "letters, digits and -._~+/"
            )
        tokens.append(token)
    if not tokens:
        raise NoTokensError(
            f"{path} contains no tokens; write one per line, or remove the setting that names this "
            "file"
        )
    return tokens


class ReloadOnChange(Generic[T]):
    """Value that is loaded from files. If a file has changed, `current` reloads the value."""

    def __init__(self, files: Sequence[Path], load: Callable[[T | None], T]) -> None:
        """Load a value from files for the first time.

        Args:
            files: Files that the value depends on.
            load: Function that loads the value. Its argument is the previous value, or None the
                first time. It raises ServingError if a file is invalid; a previous value then stays
                in use.

        Raises:
            ServingError: a file is invalid.
        """
        self._files = files
        self._load = load
        self._versions = self._file_versions()
        self._value = load(None)

    def current(self) -> T:
        """Return the value loaded from the files. If a file has changed, reload the value first.

        If the reload fails, log the error and return the previous value.
        """
        versions = self._file_versions()
        if versions != self._versions:
            self._versions = versions
            names = " and ".join(map(str, self._files))
            try:
                self._value = self._load(self._value)
            except ServingError as error:
                _log.error("cannot reload %s; the previous content stays in use: %s", names, error)
            else:
                if self._value:  # `TokenFile` has reported an empty file
                    _log.info("reloaded %s", names)
        return self._value

    def _file_versions(self) -> list[tuple[int, ...] | None]:
        return [_file_version(path) for path in self._files]


class TokenFile:
    """Valid bearer tokens from a file. If the file changes, it is reloaded.

    If the file is emptied or deleted, no token is valid. If it cannot be read or contains an
    invalid token, the previous tokens stay valid.
    """

    def __init__(self, path: Path) -> None:
        """Read the tokens in the file `path`.

        Raises:
            ServingError: the file cannot be read, contains an invalid token, or contains no token.
        """
        self._path = path
        self._digests = ReloadOnChange([path], self._load)

    def contains(self, token: str) -> bool:
        """Return whether `token` is one of the valid tokens."""
        digest = _digest(token)
        # All tokens are compared, so that the duration does not reveal which one matches.
        return sum(hmac.compare_digest(digest, other) for other in self._digests.current()) > 0

    def _load(self, previous: tuple[bytes, ...] | None) -> tuple[bytes, ...]:
        try:
            return tuple(map(_digest, read_tokens(self._path)))
        except NoTokensError as error:
            if previous is None:
                raise
            # The operator has revoked all tokens.
            _log.error("requests that need a token from %s are now rejected: %s", self._path, error)
            return ()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _file_version(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the file is written or replaced. None: file inaccessible."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size

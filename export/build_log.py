"""TensorRT's messages: all of them in a file, and those a build needs at hand."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..plugins.tensorrt_log import ERRORS


class BuildLog:
    """A file with everything that TensorRT says while it builds."""

    def __init__(self, path: Path) -> None:
        """Name the file; it is made, or an older one replaced, by the first section.

        A disk that is full ends the file, and not the build.
        """
        self.path = path
        self.errors: list[str] = []
        """Errors of the section, each on one line."""
        self.listing = ""
        """The finished engine's layers as the builder lists them, once it does."""
        self._file: IO[str] | None = None
        self._mode = "w"

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Take down the messages about one engine."""
        self.errors, self.listing = [], ""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self._file = self.path.open(self._mode)
        self._mode = "a"
        self._write(f"=== {title}\n")
        try:
            yield
        finally:
            self._file = None
            with suppress(OSError):
                file.close()

    def write(self, severity: str, message: str) -> None:
        """Take down a message; objects that TensorRT frees late may send one after the section."""
        if severity in ERRORS:
            self.errors.append(" ".join(message.split()))
        elif message.startswith("Layers:\n"):
            self.listing = message
        self._write(f"{severity} {message}\n")

    def _write(self, text: str) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.write(text)

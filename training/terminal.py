"""Log lines and progress bars of a training run on standard error."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .distributed import Worker, is_main_process
from .evaluation.validation import ExpectationError
from .reporting import DivergenceError, warn_of_unwritten

logger = logging.getLogger(__name__)

_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s")


class _Console(Console):
    """Console that raises `BrokenPipeError` if its pipe is closed."""

    def on_broken_pipe(self) -> None:
        """Raise the current `BrokenPipeError` again. Rich's method would end the process."""
        raise


class _ConsoleHandler(logging.Handler):
    """Logging handler that prints lines above the progress bars, without markup and wrapping.

    On a write error, such as a full disk, it redirects the console to /dev/null and logs a warning.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(
                self.format(record), markup=False, emoji=False, highlight=False, soft_wrap=True
            )
        except OSError as error:
            # Redirect the file descriptor, because the progress bars also write to it, and so does
            # Python when it exits.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._console.file.fileno())
            warn_of_unwritten(Path("standard error"), error)


class _FileHandler(logging.FileHandler):
    """Log file handler. After a write error, such as a full disk, it warns and writes no more."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """If `emit` failed with an `OSError`, remove this handler and log a warning."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        _package_logger().removeHandler(self)
        warn_of_unwritten(Path(self.baseFilename), error)

    def close(self) -> None:
        """Close the log file. A pending line that cannot be written is lost."""
        with suppress(OSError):
            super().close()


def _package_logger() -> logging.Logger:
    return logging.getLogger(__name__.partition(".")[0])


def _handlers_of(logger: logging.Logger) -> list[logging.Handler]:
    """Return the handlers that receive a logger's records: its own, and those of the root."""
    root = logging.getLogger()
    return [*logger.handlers, *(root.handlers if logger.propagate else ())]


def _prints_to_terminal(handler: logging.Handler) -> bool:
    """Return whether a handler prints INFO records to standard output or error."""
    stream = getattr(handler, "stream", None)
    is_standard = stream is not None and (stream is sys.stdout or stream is sys.stderr)
    return is_standard and handler.level <= logging.INFO


@contextmanager
def terminal_progress(worker: Worker, log: Path | None = None) -> Iterator[Progress]:
    """Show the package's log records and progress bars on standard error in a `with` block.

    Rank 0 logs INFO and above, the other ranks WARNING and above, unless the program has set the
    level of the package's logger. If a stream handler of the program already prints INFO records to
    standard output or error, records are not printed again, and no bars are shown.

    Args:
        worker: Rank of this process.
        log: File to which rank 0 also appends its log records. None: no file.

    Yields:
        Progress bars. Each task must be added with a field `note`, the text at the end of its bar.
        Bars are shown only on rank 0, and only if standard error is a terminal.
    """
    console = _Console(stderr=True)
    if console.is_jupyter:
        # Print plain log lines. Rich would put each line into an HTML element of its own, and
        # notebooks cannot redraw its progress bars.
        console = _Console(stderr=True, force_jupyter=False, force_terminal=False)
    package = _package_logger()
    prints = any(_prints_to_terminal(handler) for handler in _handlers_of(package))
    handlers: list[logging.Handler] = [] if prints else [_ConsoleHandler(console)]
    if worker.is_main and log is not None:
        # File and class names can contain bytes that are not UTF-8.
        handlers.append(_FileHandler(log, encoding="utf-8", errors="backslashreplace"))
    level = package.level
    if level == logging.NOTSET:
        package.setLevel(logging.INFO if worker.is_main else logging.WARNING)
    for handler in handlers:
        handler.setFormatter(_FORMAT)
        package.addHandler(handler)
    try:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            # Lines of other handlers would begin in the middle of a bar.
            disable=prints or not (worker.is_main and console.is_terminal),
        ) as progress:
            yield progress
    finally:
        package.setLevel(level)
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()


@contextmanager
def errors_of_main_process() -> Iterator[None]:
    """In a `with` block, let only rank 0 raise `DivergenceError` and `ExpectationError`.

    These errors occur on all ranks. The other ranks exit with code 1 without a message.
    """
    try:
        yield
    except (DivergenceError, ExpectationError):
        if is_main_process():
            raise
        raise SystemExit(1) from None

"""What a run shows on standard error: its log, and bars of what is under way."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .distributed import Worker, is_main_process
from .reporting import DivergenceError
from .validation import ExpectationError

_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s")


class _ConsoleHandler(logging.Handler):
    """Prints records as they are, above the bars, in lines as long as they come."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(
            self.format(record), markup=False, emoji=False, highlight=False, soft_wrap=True
        )


@contextmanager
def shown_on_terminal(worker: Worker, log: Path | None = None) -> Iterator[Progress]:
    """Show what the package logs: of the first rank all, of the others warnings.

    Args:
        worker: this process.
        log: file that the first rank's lines are added to.

    Yields:
        Bars for tasks, of which each has a field `note`; shown by the first rank on a terminal.
    """
    console = Console(stderr=True)
    handlers: list[logging.Handler] = [_ConsoleHandler(console)]
    if worker.is_main and log is not None:
        handlers.append(logging.FileHandler(log))
    package = logging.getLogger(__name__.partition(".")[0])
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
            disable=not (worker.is_main and console.is_terminal),
        ) as progress:
            yield progress
    finally:
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()


@contextmanager
def said_once() -> Iterator[None]:
    """Leave it to the first process to say what all of them find alike; the others only fail."""
    try:
        yield
    except (DivergenceError, ExpectationError):
        if is_main_process():
            raise
        raise SystemExit(1) from None

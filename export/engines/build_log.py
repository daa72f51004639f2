"""Log file and progress bars of an engine build."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.progress import Progress, TaskID

from ...plugins.tensorrt.log import ERRORS


class BuildLog:
    """Log file with TensorRT's messages from all engine builds of one export."""

    def __init__(self, path: Path) -> None:
        """Set the path of the log file, which the first call of `section` creates or replaces.

        If a message cannot be written, for example because the disk is full, it is dropped without
        an error.
        """
        self.path = path
        # Errors since the start of the latest `section` block, each on one line.
        self.errors: list[str] = []
        # TensorRT's message that lists the finished engine's layers. Empty until it is logged.
        self.listing = ""
        self._file: IO[str] | None = None
        self._mode = "w"

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Context manager: write TensorRT's messages to the log file while the `with` block runs.

        The line `title` precedes the messages. The start of the block clears the attributes
        `errors` (error messages) and `listing` (TensorRT's message that lists the engine's layers).
        The method `write` then fills both.
        """
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
        """Add a message from TensorRT to the log file, if a `section` block is running.

        An error message is also appended to the attribute `errors`. The message that lists the
        engine's layers is also stored in the attribute `listing`.
        """
        # TensorRT also logs after the `with` block, because it frees some objects late. Those
        # messages do not get into the file.
        if severity in ERRORS:
            self.errors.append(" ".join(message.split()))
        elif message.startswith("Layers:\n"):
            self.listing = message
        self._write(f"{severity} {message}\n")

    def _write(self, text: str) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.write(text)


class BuildProgress:
    """Progress bars of the phases of an engine build. Nested phases are indented.

    TensorRT calls the methods from its own threads.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._depths: dict[str | None, int] = {None: -1}
        self._is_cancelled = False
        # Latest exception that a method below raised when TensorRT called it. `progress_monitor`
        # stores it and stops the build, because TensorRT would only print it.
        self.error: Exception | None = None

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Add a progress bar for a build phase of `steps` steps.

        `parent` is the phase that contains this phase, or None for a top-level phase.
        """
        self._depths[phase] = self._depths.get(parent, -1) + 1
        label = "  " * self._depths[phase] + phase
        self._bars[phase] = self._progress.add_task(label, total=steps)

    def advance(self, phase: str, step: int) -> bool:
        """Mark a step of a build phase as complete. The first step is 0.

        Return False if the build was cancelled.
        """
        if phase in self._bars:
            self._progress.update(self._bars[phase], completed=step + 1)
        return not self._is_cancelled

    def finish(self, phase: str) -> None:
        """Remove the progress bar of a build phase."""
        if phase in self._bars:
            self._progress.remove_task(self._bars.pop(phase))

    def cancel(self) -> None:
        """Stop the engine build after its current step."""
        self._is_cancelled = True


def progress_monitor(trt: Any, progress: BuildProgress) -> Any:
    """Return a `trt.IProgressMonitor` that updates progress bars.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        progress: progress bars to update.
    """

    def guarded(method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            progress.error = error
            progress.cancel()
            return False

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            guarded(progress.start, phase, parent, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            return bool(guarded(progress.advance, phase, step))

        def phase_finish(self, phase: str) -> None:
            guarded(progress.finish, phase)

    return Monitor()

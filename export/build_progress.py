"""How far TensorRT's builder is, on the terminal, and how it is told to stop."""

from typing import Any

from rich.progress import Progress, TaskID


class BuildProgress:
    """Phases of a build as bars, those within another indented.

    TensorRT calls from threads of its own.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._depths: dict[str | None, int] = {None: -1}
        self._is_cancelled = False

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Show a phase of so many steps within another."""
        self._depths[phase] = self._depths.get(parent, -1) + 1
        label = "  " * self._depths[phase] + phase
        self._bars[phase] = self._progress.add_task(label, total=steps)

    def advance(self, phase: str, step: int) -> bool:
        """Move a phase's bar behind a step, counted from 0; says whether to go on."""
        if phase in self._bars:
            self._progress.update(self._bars[phase], completed=step + 1)
        return not self._is_cancelled

    def finish(self, phase: str) -> None:
        """Take a phase off the terminal."""
        if phase in self._bars:
            self._progress.remove_task(self._bars.pop(phase))

    def cancel(self) -> None:
        """Have the builder stop after its present step."""
        self._is_cancelled = True


def monitor_into(trt: Any, progress: BuildProgress) -> Any:
    """A `trt.IProgressMonitor` that moves bars.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        progress: the bars.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            progress.start(phase, parent, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            return progress.advance(phase, step)

        def phase_finish(self, phase: str) -> None:
            progress.finish(phase)

    return Monitor()

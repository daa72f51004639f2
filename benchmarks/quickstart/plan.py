"""Steps of a quickstart with expected durations, and the commands to type after it."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ...training.config import TrainConfig

# Durations measured on two CPU cores. Those of all other steps do not depend on the options.
_SECONDS_PER_DRAWN_IMAGE: Final = 0.007
_SECONDS_PER_TRAINED_IMAGE: Final = 0.04


class PlannedStep(NamedTuple):
    """Step of a quickstart, with its expected duration on two CPU cores."""

    title: str
    seconds: float


class _TimeLeft(ProgressColumn):
    """Progress column with the expected time until a step ends. `Task.total` is in seconds."""

    def render(self, task: Task) -> Text:
        """Return the expected remaining time of a task as text."""
        left = (task.total or 0) - (task.elapsed or 0)
        return Text(f"about {left:.0f} s left" if left > 0 else "takes longer than expected")


def plan_steps(images: int, config: "TrainConfig") -> tuple[PlannedStep, ...]:
    """Return the steps of a quickstart with their expected durations.

    Args:
        images: Number of synthetic images to draw for the data set.
        config: Configuration of the training.
    """
    trained = config.solver.max_iterations * config.solver.images_per_batch
    return (
        PlannedStep("generate a data set", 5 + images * _SECONDS_PER_DRAWN_IMAGE),
        PlannedStep("train from scratch and evaluate", 35 + trained * _SECONDS_PER_TRAINED_IMAGE),
        PlannedStep("export to ONNX", 18),
        PlannedStep("verify the bundle against the checkpoint", 3),
        PlannedStep("serve the bundle and send images to the server", 10),
        PlannedStep("measure inference", 10),
        PlannedStep("measure the server", 10),
    )


def plan_table(steps: Sequence[PlannedStep]) -> Table:
    """Return the steps with their expected minutes as a table."""
    table = Table("step", "", title="plan", title_justify="left")
    table.add_column("minutes on two CPU cores", justify="right")
    for number, step in enumerate(steps, start=1):
        table.add_row(str(number), step.title, f"{step.seconds / 60:.1f}")
    table.add_section()
    table.add_row("", "all", f"{sum(step.seconds for step in steps) / 60:.0f}")
    return table


@contextmanager
def step(
    console: Console,
    steps: Sequence[PlannedStep],
    number: int,
    folder: Path | None = None,
    *,
    has_progress: bool = False,
) -> Iterator[None]:
    """Print the title of a step before the `with` block, and the step's duration afterwards.

    While the `with` block runs, the expected time left is shown if the output is a terminal.

    Args:
        console: Console to print to.
        steps: All steps.
        number: Number of the step, from 1.
        folder: Folder of the step's outputs, printed at the end. None: no folder is printed.
        has_progress: Whether the code in the `with` block shows its progress. If so, the time left
            is not shown.
    """
    title, seconds = steps[number - 1]
    console.rule(f"{number}/{len(steps)} {title}", align="left")
    start = time.monotonic()
    hidden = has_progress or not console.is_terminal
    columns = (SpinnerColumn(), _TimeLeft())
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        progress.add_task(title, total=seconds)
        yield
    location = f", in {folder}" if folder else ""
    console.print(f"done in {time.monotonic() - start:.0f} s{location}", soft_wrap=True)


def next_commands(bundle: Path) -> dict[str, str]:
    """Return commands to type after a quickstart. The keys are the commands' purposes."""
    program = shlex.quote(_program())
    return {
        "To train on your own images (COCO, Roboflow, CVAT, LabelMe or YOLO)": (
            f"{program} train finetune DATA"
        ),
        "To serve this model with a page, and open http://localhost:8080 in a browser": (
            f"{program} serve {shlex.quote(str(bundle))} --http-port 8080"
        ),
        "To detect COCO's classes in a photograph with a published model": (
            f"{program} predict torchvision:maskrcnn_resnet50_fpn_v2 IMAGE"
        ),
    }


def _program() -> str:
    """Return the command `maskrcnn`, or the path of its file if it is not on PATH."""
    if shutil.which("maskrcnn"):
        return "maskrcnn"
    path = Path(sys.executable).with_name("maskrcnn")
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)

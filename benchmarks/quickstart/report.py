"""Report of a quickstart: plan, durations of the steps, figure of predictions, next commands."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Table
from rich.text import Text

from ...model.image_decoding import decode_image
from ...model.masks import mask_from_rle, rle_from_mask
from ...model.resizing import resize_image
from ...model.shell_commands import shell_path
from ...serving.detections import Detections
from ...serving.result_formats import draw_detections
from ...training.config import TrainConfig
from ...training.data.coco.dataset import CocoDataset, ImageRecord
from ...training.data.coco.segmentation_masks import mask_from_segmentation

# Durations per image of data generation and of training, measured on two CPU cores. The durations
# of the other steps do not depend on the options.
_SECONDS_PER_DRAWN_IMAGE: Final = 0.007
_SECONDS_PER_TRAINED_IMAGE: Final = 0.04

# Number of rows in the figure of predictions. A row shows two images, each with its ground truth
# beside its predictions.
_ROWS = 4
# Factor by which images are enlarged, so that labels are readable.
_ENLARGEMENT = 3
# Only detections with a higher score are drawn.
_MIN_SCORE = 0.5


class PlannedStep(NamedTuple):
    """Step of a quickstart, with its expected duration on two CPU cores."""

    title: str
    seconds: float


class _TimeLeft(ProgressColumn):
    """Progress column with the expected time until a step ends.

    `Task.total` must be the expected duration of the step in seconds.
    """

    def render(self, task: Task) -> Text:
        """Return the expected remaining time of a task as text."""
        left = (task.total or 0) - (task.elapsed or 0)
        return Text(f"about {left:.0f} s left" if left > 0 else "takes longer than expected")


def plan_steps(images: int, config: TrainConfig) -> tuple[PlannedStep, ...]:
    """Return the steps of a quickstart with their expected durations.

    Args:
        images: Number of synthetic images to generate, for training and validation.
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
    """Return a table of a quickstart's steps and their expected durations in minutes."""
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
    """Print the title of a quickstart step before the `with` block, and its duration after it.

    While the `with` block runs, the expected time left is shown if the output is a terminal.

    Args:
        console: Console to print to.
        steps: All steps of the quickstart.
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


def draw_comparison(dataset: CocoDataset, predictions: Sequence[Detections], image: Path) -> None:
    """Draw ground truth beside predictions.

    Of the images that have predictions, those with the most annotated objects are drawn.

    Args:
        dataset: Images and annotations.
        predictions: Detections in the first images of the data set, one item per image, in pixels
            of the source image.
        image: PNG file to write.
    """
    pairs = zip(dataset.records, predictions, strict=False)
    chosen = sorted(pairs, key=lambda pair: -len(pair[0].objects))[: 2 * _ROWS]
    figure = Figure((16, 3.2 * _ROWS), layout="constrained")
    axes = figure.subplots(_ROWS, 4)
    cells = iter(axes.flat)
    for record, detections in chosen:
        pixels = decode_image(record.path.read_bytes())
        enlarged = resize_image(pixels, _ENLARGEMENT * record.height, _ENLARGEMENT * record.width)
        truth = _ground_truth_of(record, dataset)
        for title, shown in (("ground truth", truth), ("prediction", _enlarged(detections))):
            cell = next(cells, None)
            if cell is not None:
                cell.imshow(draw_detections(enlarged, shown))
                cell.set_title(title, fontsize=10)
    for cell in axes.flat:
        cell.axis("off")
    figure.savefig(image, dpi=100)


def _ground_truth_of(record: ImageRecord, dataset: CocoDataset) -> Detections:
    """Return an image's annotations as detections of score 1.

    Boxes and masks are in pixels of the drawn image, whose sides are `_ENLARGEMENT` times those of
    the source image.
    """
    size = (_ENLARGEMENT * record.height, _ENLARGEMENT * record.width)
    masks = [
        mask_from_segmentation(instance.segmentation, (record.height, record.width), size)
        for instance in record.objects
    ]
    boxes = [instance.clipped_box(record.height, record.width) for instance in record.objects]
    labels = np.array([instance.label for instance in record.objects], np.int64)
    return Detections(
        height=size[0],
        width=size[1],
        boxes=np.array(boxes, np.float32).reshape(-1, 4) * _ENLARGEMENT,
        scores=np.ones(len(masks), np.float32),
        labels=labels,
        category_ids=labels,
        class_names=tuple(dataset.categories[label - 1].name for label in labels),
        rles=tuple(map(rle_from_mask, masks)),
    )


def _enlarged(detections: Detections) -> Detections:
    """Select detections with scores above `_MIN_SCORE`, and scale them by `_ENLARGEMENT`."""
    indices = np.flatnonzero(detections.scores > _MIN_SCORE)
    rles = detections.rles or ()
    masks = [
        np.kron(mask_from_rle(rles[i]), np.ones((_ENLARGEMENT,) * 2, np.uint8)) for i in indices
    ]
    return replace(
        detections,
        height=_ENLARGEMENT * detections.height,
        width=_ENLARGEMENT * detections.width,
        boxes=detections.boxes[indices] * _ENLARGEMENT,
        scores=detections.scores[indices],
        labels=detections.labels[indices],
        category_ids=detections.category_ids[indices],
        class_names=tuple(detections.class_names[i] for i in indices),
        rles=tuple(map(rle_from_mask, masks)),
    )


def next_commands(bundle: Path) -> dict[str, str]:
    """Return the commands to suggest after a quickstart, as a mapping from purpose to command."""
    program = shlex.quote(_program())
    return {
        "To train on your own images (COCO, Roboflow, CVAT, LabelMe or YOLO)": (
            f"{program} train finetune DATA"
        ),
        "To serve this model with a web page, which a browser opens at http://localhost:8080": (
            f"{program} serve {shell_path(bundle)} --http-port 8080"
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

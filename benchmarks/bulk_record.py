"""The record of a benchmark in bulk: a page, a picture of the steps, and all numbers as JSON."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from .bulk import BulkResult
from .bulk_report import SPEED_COLUMNS, speed_rows, step_rows
from .record import begin_record, markdown_table, record_page
from .report import Report

mpl.use("Agg")
from matplotlib import pyplot as plt

_GOAL = 0.7
"""Share of the engine's own rate."""

_COUNTED = """\
Images are {images}. "images/s" is from files in the memory of the host to detections with masks in
COCO's run-length encoding there: batches of one input size, each step at work at another batch,
measured when all are busy. "engine" is the rate of the step with the model alone, batches of as
many images queued back to back, and "share" what is reached of it. "found" are the detections of an
image, each with a mask to be encoded.
"""
_STEPS = """\
Steps were measured one after the other, each waited for, and do not add up to what a batch takes,
since they overlap. On a GPU, "files" decodes on the host what the GPU cannot, "pixels" the rest
there; "images" resizes and pads; "masks" scales the boxes, pastes the masks, encodes them in COCO's
way and copies that to the host; "strings" picks out what is wanted. Elsewhere "images" is decoding,
resizing and padding on one core, and "masks" all that follows the model.
"""


def write_record(report: Report, results: Sequence[BulkResult], images: str, folder: Path) -> Path:
    """Write `bulk-<gpu>-<yyyymm>.md`, and `.png` and `.json` beside it.

    Args:
        report: where, when and how they were measured.
        results: a batch size each, at least one.
        images: what the images were, in words.
        folder: made if it does not exist.

    Returns:
        The page.
    """
    page = begin_record("bulk", report, folder)
    picture = page.with_suffix(".png")
    plot_steps(results, picture)
    page.write_text(_page(report, results, images, picture.name))
    return page


def plot_steps(results: Sequence[BulkResult], picture: Path) -> None:
    """Draw the time of an image by step, and beside it what it takes in bulk, into a PNG."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    labels = [str(result.batch) for result in results]
    bottoms = [0.0] * len(results)
    for step in results[0].step_milliseconds:
        heights = [result.step_milliseconds[step] / result.batch for result in results]
        axes.bar(labels, heights, bottom=bottoms, width=0.5, label=f"{step}, alone")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for label, marker, rates in (
        ("all at once", "D", [result.images_per_second for result in results]),
        ("the engine, alone", "o", [result.engine_images_per_second for result in results]),
    ):
        axes.plot(labels, [1000 / rate for rate in rates], f"k{marker}", label=label)
    axes.set(xlabel="images a batch", ylabel="ms an image", title="From files to masks")
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def goal_sentences(results: Sequence[BulkResult]) -> list[str]:
    """A sentence a batch size on a GPU: what was reached, and whether that is enough."""
    return [
        f"Batch {r.batch} in {r.precision}: {r.images_per_second:.0f} images/s, {r.share:.0%} of "
        f"the engine's own; the bar of {_GOAL:.0%} is {'met' if r.share >= _GOAL else 'missed'}."
        for r in results
        if r.device == "cuda"
    ]


def _page(report: Report, results: Sequence[BulkResult], images: str, picture: str) -> str:
    first = results[0]
    by_step = [(str(r.batch), *row) for r, row in zip(results, step_rows(results), strict=True)]
    return record_page(
        f"From files to masks, {first.engine} in {first.precision}",
        report,
        on_gpu=first.device == "cuda",
        goals=goal_sentences(results),
        body=[
            "\n## Speed\n",
            markdown_table(SPEED_COLUMNS, speed_rows(results)),
            "\n## Steps of a batch, in ms\n",
            markdown_table(("batch", *first.step_milliseconds), by_step),
            f"\n![Time of an image by step]({picture})",
        ],
        counted=[_COUNTED.format(images=images), _STEPS],
    )

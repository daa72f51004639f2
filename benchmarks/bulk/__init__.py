"""`maskrcnn bench bulk`: throughput from JPEG files to RLE masks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ...model.bundle.manifest import Precision
from ...serving.config import BackendName
from ..common.images import PHOTO_LIKE, describe_images, images_option, read_images
from ..common.record import (
    PlotGrid,
    Record,
    ResultTable,
    format_verdict,
    json_option,
    output_option,
    publish,
)
from ..common.timing import seconds_option

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .measure import BulkResult

# Goal on a GPU: minimum throughput as a fraction of the throughput of the model step alone.
_GOAL = 0.7

_IMAGES_NOTE = """\
Images are {images}. All images of a batch are resized and padded to the same input size. All steps
run concurrently, each on a different batch, and the clock starts when all steps are busy. The table
of throughput has these columns:
"""
_THROUGHPUT_MEANINGS = {
    "images/s": "throughput from files in host memory to detections with COCO RLE masks in host "
    "memory",
    "engine": "throughput in images/s of the model step alone, with batches queued back to back",
    "share": '"images/s" divided by "engine"',
    "boxes": "mean number of detections per image, each with a mask to encode",
}
_STEPS_NOTE = """\
For the table of steps, each step was measured alone. In bulk prediction the steps run concurrently,
so the sum of the step times exceeds the time per batch. Steps besides the model are:
"""
_GPU_STEP_MEANINGS = {
    "read": "decoding on the CPU, for images that the GPU decoder does not support",
    "decode": "decoding of all other images on the GPU",
    "pad": "resizing and padding",
    "paste": "scaling of boxes, pasting of masks, COCO RLE encoding, and copy to the host",
    "select": "selection of the requested outputs",
}
_CPU_STEP_MEANINGS = {
    "decode": "decoding, resizing and padding on one core",
    "encode": "all work after the model",
}


@click.command(context_settings={"show_default": True})
@click.argument("model")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(8,))
@click.option(
    "--precision", type=click.Choice(get_args(Precision)),
    help="Precision to measure. Default: the precision that `maskrcnn serve` selects.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(get_args(BackendName)), default="auto",
    help="Inference backend; auto selects as `maskrcnn serve` does.",
)  # fmt: skip
@images_option("generated ones")
@seconds_option
@json_option
@output_option("a page, a plot of the steps")
def bulk(
    model: str,
    sources: tuple[Path, ...],
    json_path: Path | None,
    output: Path | None,
    **values: Any,
) -> None:
    """Measure MODEL's throughput from image files to RLE masks, and the time of each step.

    MODEL is a bundle, a checkpoint, or a name that `maskrcnn weights list` prints.
    """
    from ...serving.commands.options import bundle_for_backend
    from .measure import BulkSettings, measure_bulk

    images = read_images(sources)
    precisions = () if values["precision"] is None else (values["precision"],)
    bundle = bundle_for_backend(model, values["backend"], precisions)
    results = measure_bulk(bundle, BulkSettings(images=images, **values))
    record = bulk_record(results, describe_images(images, sources, PHOTO_LIKE))
    publish(record, json_path, output)


def bulk_record(results: Sequence["BulkResult"], images: str) -> Record:
    """Return the tables, plots and notes of one run of the bulk-prediction benchmark.

    Args:
        results: One result per batch size, at least one. All have the same backend and precision.
        images: Description of the benchmark images, for the notes.
    """
    first = results[0]
    steps = tuple(first.step_milliseconds)
    return Record(
        subject="bulk",
        title=f"From files to masks, {first.engine} in {first.precision}",
        results=results,
        tables=[
            ResultTable(
                heading="Throughput",
                columns=("batch", "images/s", "engine", "share", "boxes"),
                rows=[
                    (
                        str(r.batch),
                        f"{r.images_per_second:.1f}",
                        f"{r.engine_images_per_second:.1f}",
                        f"{r.share:.1%}",
                        f"{r.detections_per_image:.1f}",
                    )
                    for r in results
                ],
            ),
            ResultTable(
                heading="Steps of a batch, in ms",
                columns=("batch", *steps),
                rows=[
                    (str(r.batch), *(f"{r.step_milliseconds[step]:.2f}" for step in steps))
                    for r in results
                ],
            ),
        ],
        plots=PlotGrid(
            alt="Time of an image by step", plots=[lambda axes: _plot_steps(axes, results)]
        ),
        goals=bulk_goals(results),
        notes=[
            _IMAGES_NOTE.format(images=images),
            _THROUGHPUT_MEANINGS,
            _STEPS_NOTE,
            _GPU_STEP_MEANINGS if first.device == "cuda" else _CPU_STEP_MEANINGS,
        ],
        on_gpu=first.device == "cuda",
    )


def bulk_goals(results: Sequence["BulkResult"]) -> list[str]:
    """For each result on a GPU, return a sentence that compares its `share` with the goal.

    `share` is the throughput of all steps divided by the throughput of the model step alone.
    Results on a CPU get no sentence.
    """
    return [
        f"Batch {r.batch} in {r.precision}: {r.images_per_second:.0f} images/s, {r.share:.0%} of "
        "the throughput of the model step alone; "
        f"the goal of {_GOAL:.0%} is {format_verdict(r.share >= _GOAL)}."
        for r in results
        if r.device == "cuda"
    ]


def _plot_steps(axes: "Axes", results: Sequence["BulkResult"]) -> None:
    """Plot milliseconds per image over batch size.

    Stacked bars show the time of each step when it runs alone. Diamonds show the time per image
    when all steps run concurrently. Circles show the time per image of the model step alone, with
    batches queued back to back.
    """
    labels = [str(result.batch) for result in results]
    bottoms = [0.0] * len(results)
    for step in results[0].step_milliseconds:
        heights = [result.step_milliseconds[step] / result.batch for result in results]
        axes.bar(labels, heights, bottom=bottoms, width=0.5, label=f"{step}, alone")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for label, marker, rates in (
        ("all steps concurrently", "D", [result.images_per_second for result in results]),
        ("the engine, alone", "o", [result.engine_images_per_second for result in results]),
    ):
        axes.plot(labels, [1000 / rate for rate in rates], f"k{marker}", label=label)
    axes.set(xlabel="images per batch", ylabel="ms per image", title="From files to masks")
    axes.legend()

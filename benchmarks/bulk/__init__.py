"""`maskrcnn bench bulk`: throughput of offline prediction, from JPEG files to RLE masks."""

from pathlib import Path
from typing import Any, get_args

import click

from ...model.bundle.manifest import Precision
from ...serving.config import BackendName
from ..common.images import PHOTO_LIKE, describe_images, images_option, read_images
from ..common.record import json_option, output_option, publish
from ..common.timing import seconds_option


@click.command(context_settings={"show_default": True})
@click.argument("model")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(8,))
@click.option(
    "--precision", type=click.Choice(get_args(Precision)),
    help="Default: the first precision of the bundle that the backend supports.",
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
    from ...serving.commands.model_reference import bundle_for_backend
    from .measure import BulkSettings, measure_bulk
    from .record import bulk_record

    images = read_images(sources)
    precisions = () if values["precision"] is None else (values["precision"],)
    bundle = bundle_for_backend(model, values["backend"], precisions)
    results = measure_bulk(bundle, BulkSettings(images=images, **values))
    record = bulk_record(results, describe_images(images, sources, PHOTO_LIKE))
    publish(record, json_path, output)

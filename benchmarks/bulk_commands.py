"""The verb `maskrcnn bench bulk`."""

from pathlib import Path
from typing import get_args

import click

from ..model.manifest import Precision
from ..serving.config import BackendName
from .options import (
    images_in_words,
    images_option,
    json_option,
    output_option,
    read_images,
    seconds_option,
)


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(8,))
@click.option(
    "--precision", type=click.Choice(get_args(Precision)),
    help="The default is the backend's first in the bundle.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(get_args(BackendName)), default="auto",
    help="What computes; auto takes the fastest that runs here.",
)  # fmt: skip
@images_option("drawn ones")
@seconds_option
@json_option
@output_option("a page, a picture of the steps")
def bulk(
    bundle: Path,
    batches: tuple[int, ...],
    precision: Precision | None,
    backend: BackendName,
    sources: tuple[Path, ...],
    seconds: float,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Measure BUNDLE from image files to run-length encoded masks, by step and as a whole."""
    from .bulk import BulkSettings, measure_bulk
    from .bulk_images import PHOTO_LIKE
    from .bulk_report import bulk_table
    from .report import Report, show

    images = read_images(sources)
    settings = BulkSettings(
        precision=precision,
        backend=backend,
        batches=batches,
        images=images,
        seconds=seconds,
    )
    results = measure_bulk(bundle, settings)
    report = Report(results)
    show(report, bulk_table(results), json_path)
    if output is not None:
        from .bulk_record import write_record

        what = images_in_words(images, sources, PHOTO_LIKE)
        click.echo(f"the record is {write_record(report, results, what, output)}")

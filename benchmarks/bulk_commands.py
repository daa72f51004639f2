"""The verb `maskrcnn bench bulk`."""

from pathlib import Path
from typing import get_args

import click

from ..model.manifest import Precision
from ..serving.config import BackendName


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
@click.option(
    "--images", "sources", multiple=True, type=click.Path(exists=True, path_type=Path),
    help="Image or folder of images to use in place of drawn ones.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=5.0,
    help="Length of each measurement.",
)  # fmt: skip
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path),
    help="Also write results and versions here.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a record: a page, a picture of the steps, and JSON.",
)  # fmt: skip
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
    from ..serving.reports import image_files
    from .bulk import BulkSettings, measure_bulk
    from .bulk_images import PHOTO_LIKE
    from .bulk_report import bulk_table
    from .report import Report, show

    files = image_files(sources) if sources else []
    settings = BulkSettings(
        precision=precision,
        backend=backend,
        batches=batches,
        images=[path.read_bytes() for path in files],
        seconds=seconds,
    )
    results = measure_bulk(bundle, settings)
    report = Report(results)
    show(report, bulk_table(results), json_path)
    if output is not None:
        from .bulk_record import write_record

        names = ", ".join(map(str, sources))
        images = f"{len(files)} files of {names}" if files else PHOTO_LIKE
        click.echo(f"the record is {write_record(report, results, images, output)}")

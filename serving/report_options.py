"""What `client` and `predict` share: images to detect in, and where to write what is found."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import click

from ..model.option_types import FiniteRange
from .config import ReportFormat

_Command = Callable[..., None]

SOURCE = click.Path(exists=True, path_type=Path)
"""Type of an image or a folder of images."""

REPORT_OPTIONS = (
    click.option(
        "-o", "--output", type=click.Path(file_okay=False), default="detections",
        show_default=True,
        help="Folder for what is found; for pictures, another than that of the images.",
    ),
    click.option(
        "--format", "formats", multiple=True, type=click.Choice(get_args(ReportFormat)),
        default=("pictures", "coco"), show_default=True,
        help="What to write, once for each: pictures, a PNG of each image with its detections "
        "drawn; coco, all in detections.json; numpy, an NPZ of each image's arrays.",
    ),
    click.option(
        "--score-threshold", type=FiniteRange(0, 1), default=0.5, show_default=True,
        help="Leave out detections that score no higher.",
    ),
)  # fmt: skip


def options_of(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Decorate a command with options, which its help shows in their order."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def is_address(place: object) -> bool:
    """Whether a place is not one of this machine, as `s3://bucket/folder`."""
    return "://" in str(place)


def files_and_folder(
    images: Sequence[Path | str], output: str, formats: Sequence[ReportFormat]
) -> tuple[list[Path], Path]:
    """What to detect in and where to write, checked before anything is loaded or asked.

    Raises:
        click.UsageError: one of them is an address, there are no images, or what would be written
            collides with them or with each other.
    """
    from .results.reports import check_folder, image_files

    for image in images:
        if is_address(image):
            raise click.UsageError(f"{image} is an address, which is read only with --ray")
    if is_address(output):
        raise click.UsageError(
            f"{output} is an address, which is written to only by predict with --ray; "
            "choose a folder with --output"
        )
    files, folder = image_files([Path(image) for image in images]), Path(output)
    check_folder(folder, files, formats)
    return files, folder

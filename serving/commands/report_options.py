"""Options that `client` and `predict` share: input images, output folder and formats."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import click

from ...model.config.option_types import FiniteRange
from ..config import ReportFormat

_Command = Callable[..., None]

# Click type of an image or a folder of images.
SOURCE = click.Path(exists=True, path_type=Path)

REPORT_OPTIONS = (
    click.option(
        "-o", "--output", type=click.Path(file_okay=False), default="detections",
        show_default=True,
        help="Output folder. To write annotated images, it must not be a folder of input images.",
    ),
    click.option(
        "--format", "formats", multiple=True, type=click.Choice(get_args(ReportFormat)),
        default=("pictures", "coco"), show_default=True,
        help="Output format; repeat the option for several. `pictures`: a PNG of each image with "
        "its detections drawn. `coco`: one detections.json in COCO format. `numpy`: an NPZ of the "
        "arrays of each image. Results are named as the image without its suffix, or with it if "
        "several images have this name.",
    ),
    click.option(
        "--score-threshold", type=FiniteRange(0, 1), default=0.5, show_default=True,
        help="Keep only detections with a higher score.",
    ),
)  # fmt: skip


def options_of(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds `options` to a command, whose help lists them in this order."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def is_address(path: object) -> bool:
    """Return whether a path is an address such as `s3://bucket/folder`, not a local path."""
    return "://" in str(path)


def files_and_folder(
    images: Sequence[Path | str], output: str, formats: Sequence[ReportFormat]
) -> tuple[list[Path], Path]:
    """Return the input image files and the output folder, after checking both.

    Raises:
        click.UsageError: A path is an address, such as `s3://bucket/folder`; there are no images;
            or outputs would overwrite each other or be written into a folder of input images.
    """
    # Imported here because the module loads Pillow, which --help does not need.
    from .reports import check_folder, image_files

    for image in images:
        if is_address(image):
            raise click.UsageError(
                f"{image} is an address, not a local path; reading it requires --ray"
            )
    if is_address(output):
        raise click.UsageError(
            f"{output} is an address, not a local folder, and only predict --ray can write to it; "
            "choose a folder with --output"
        )
    files, folder = image_files([Path(image) for image in images]), Path(output)
    check_folder(folder, files, formats)
    return files, folder

"""Options that verbs of `maskrcnn bench` have in common, and the images that they name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..model.option_types import FiniteRange
from ..serving.config import DAY_S

POSITIVE = FiniteRange(min=0, min_open=True)
SECONDS = FiniteRange(min=0, min_open=True, max=DAY_S)

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

seconds_option = click.option(
    "--seconds", type=SECONDS, default=5.0, help="Length of each measurement."
)
json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write results and versions here.",
)


def images_option(otherwise: str) -> _Decorator:
    """Sources of images, where the verb otherwise uses something else, in words."""
    return click.option(
        "--images",
        "sources",
        multiple=True,
        type=click.Path(exists=True, path_type=Path),
        help=f"Image or folder of images to use in place of {otherwise}.",
    )


def output_option(contents: str) -> _Decorator:
    """A folder for a record, which holds JSON and more, in words."""
    return click.option(
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        help=f"Folder for a record: {contents}, and JSON.",
    )


def read_images(sources: Sequence[Path]) -> list[bytes]:
    """The contents of the images among files and folders; none if there are no sources.

    Raises:
        click.UsageError: there is no image among them, or two have the same name.
    """
    from ..serving.results.reports import image_files

    return [path.read_bytes() for path in image_files(sources)] if sources else []


def images_in_words(images: Sequence[bytes], sources: Sequence[Path], otherwise: str) -> str:
    """What was measured with, for a record: images of sources, or what was used otherwise."""
    return f"{len(images)} files of {', '.join(map(str, sources))}" if images else otherwise

"""The group `maskrcnn data`, and the command that draws data sets."""

import os
import re
from pathlib import Path

import click

from .coco_commands import download, extract, verify
from .conversion_commands import convert
from .inspection_commands import inspect

_MIN_SIDE, _MAX_SIDE = 64, 4096


def _size_from_text(
    context: click.Context, parameter: click.Parameter, text: str
) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if sides is None or not all(_MIN_SIDE <= int(s) <= _MAX_SIDE for s in sides.groups()):
        raise click.BadParameter(
            f"{text!r} is not WIDTHxHEIGHT in pixels, from {_MIN_SIDE} to {_MAX_SIDE} each, "
            "such as 320x256"
        )
    return int(sides[1]), int(sides[2])


def _classes_from_text(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[str, ...]:
    from .shapes import OUTLINES

    if text is None:
        return tuple(OUTLINES)
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(OUTLINES):
        raise click.BadParameter(
            f"{text!r} is not a list of different shapes out of {', '.join(OUTLINES)}"
        )
    return names


@click.group()
def data() -> None:
    """Download, draw, convert and inspect data sets in COCO format."""


data.add_command(convert)
data.add_command(inspect)
data.add_command(download)
data.add_command(verify)
data.add_command(extract)


@data.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.option(
    "--train", type=click.IntRange(1), default=1000, show_default=True, help="Training images."
)
@click.option(
    "--val", type=click.IntRange(1), default=200, show_default=True, help="Validation images."
)
@click.option(
    "--size",
    metavar="WxH",
    default="320x256",
    show_default=True,
    callback=_size_from_text,
    help="Width and height in pixels; every other picture is turned to a portrait.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Equal seeds draw equal files.",
)
@click.option(
    "--classes",
    metavar="NAME,...",
    callback=_classes_from_text,
    help="Shapes to draw, in the order of their category ids; all, if not given.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes; one a core, if not given.")
@click.option("--overwrite", is_flag=True, help="Replace the data set that is in DIR.")
def synthetic(
    folder: Path,
    train: int,
    val: int,
    size: tuple[int, int],
    seed: int,
    classes: tuple[str, ...],
    workers: int | None,
    overwrite: bool,
) -> None:
    """Draw a data set in COCO format into DIR.

    The pictures show textured shapes that overlap, at many scales, before textured backgrounds.
    """
    from rich.progress import Progress

    from .synthetic import SyntheticConfig, draw_dataset

    if (folder / "annotations").exists() and not overwrite:
        raise click.ClickException(
            f"{folder} holds a data set; choose another folder, or pass --overwrite"
        )
    width, height = size
    config = SyntheticConfig(
        train=train, val=val, width=width, height=height, seed=seed, classes=classes
    )
    with Progress() as progress:
        task = progress.add_task("drawing", total=train + val)
        draw_dataset(
            folder,
            config,
            workers=workers or os.cpu_count() or 1,
            on_image=lambda: progress.advance(task),
        )
    click.echo(f"drew {train} training and {val} validation images in {folder}")

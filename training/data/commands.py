"""Command group `maskrcnn data` and its command `synthetic`."""

import re
from pathlib import Path

import click

from ...model.config.option_types import OUTPUT_FOLDER
from ...model.exit_signals import exit_on_signals
from .convert.command import convert
from .download.commands import download, extract, verify
from .edit.command import filter_, merge, split
from .inspect.command import inspect

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
    from .synthetic.shapes import OUTLINES

    if text is None:
        return tuple(OUTLINES)
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(OUTLINES):
        raise click.BadParameter(
            f"{text!r} is not a comma-separated list of distinct shapes; shapes: "
            f"{', '.join(OUTLINES)}"
        )
    return names


@click.group(commands=[convert, inspect, split, merge, filter_, download, verify, extract])
def data() -> None:
    """Download, generate, convert, edit and inspect data sets in COCO format."""
    # On SIGTERM, run the `finally` blocks, so that no partial files are left.
    click.get_current_context().with_resource(exit_on_signals())


@data.command()
@click.argument("folder", type=OUTPUT_FOLDER, metavar="DIR")
@click.option(
    "--train",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Number of training images.",
)
@click.option(
    "--val",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Number of validation images.",
)
@click.option(
    "--size",
    metavar="WxH",
    default="320x256",
    show_default=True,
    callback=_size_from_text,
    help="Width and height of the images in pixels, swapped for every second image.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of all random choices. Equal seeds give equal files.",
)
@click.option(
    "--classes",
    metavar="NAME,...",
    callback=_classes_from_text,
    help="Shapes to draw, in the order of their category ids. Default: all shapes.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes. Default: one per core."
)
@click.option("--overwrite", is_flag=True, help="Replace the data set in DIR.")
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
    """Generate a synthetic data set in COCO format in DIR.

    The images show overlapping textured shapes of many sizes on textured backgrounds.
    """
    from rich.progress import Progress

    from .synthetic.dataset import SyntheticConfig, draw_dataset

    if (folder / "annotations").exists() and not overwrite:
        raise click.ClickException(
            f"{folder} contains a data set; choose another folder, or pass --overwrite"
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
            workers=workers,
            overwrite=overwrite,
            on_image=lambda: progress.advance(task),
        )
    click.echo(f"wrote {train} training and {val} validation images to {folder}")

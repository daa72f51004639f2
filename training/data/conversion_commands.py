"""Commands that turn other formats into COCO's: `maskrcnn data convert ...`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .conversion import Conversion

_FOLDER = click.argument(
    "folder", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR"
)
_OUT = click.argument("out", type=click.Path(path_type=Path, file_okay=False), metavar="OUT")
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace the files that are in OUT.")


@click.group()
def convert() -> None:
    """Turn a data set of another format into COCO files.

    OUT gets train.json and val.json. Images are neither copied nor changed: the command prints
    which folder the files refer to.
    """


@convert.command()
@_FOLDER
@_OUT
@_OVERWRITE
def cityscapes(folder: Path, out: Path, overwrite: bool) -> None:
    """Convert Cityscapes' fine annotations.

    DIR holds gtFine and leftImg8bit. The 8 classes of the instance benchmark keep their ids; groups
    become crowds.
    """
    from .cityscapes import cityscapes as read_folder

    _convert(read_folder, folder, out, overwrite)


@convert.command()
@_FOLDER
@_OUT
@_OVERWRITE
def voc(folder: Path, out: Path, overwrite: bool) -> None:
    """Convert the segmented images of Pascal VOC.

    DIR is a folder such as VOCdevkit/VOC2012. Void pixels belong to nothing; objects marked
    difficult become crowds, which training ignores and evaluation forgives.
    """
    from .voc import voc as read_folder

    _convert(read_folder, folder, out, overwrite)


def _convert(
    read_folder: "Callable[[Path], Conversion]", folder: Path, out: Path, overwrite: bool
) -> None:
    from rich.progress import Progress

    from .conversion import write_coco_files

    conversion = read_folder(folder)
    with Progress() as progress:
        total = sum(len(split.sources) for split in conversion.splits.values())
        task = progress.add_task("converting", total=total)
        written = write_coco_files(
            conversion, out, overwrite=overwrite, on_image=lambda: progress.advance(task)
        )
    for name, file in written.items():
        click.echo(
            f"{file.path}: {file.images} images, {file.objects} objects, {file.crowds} crowds; "
            f"use it with data.{name}.annotations={file.path} "
            f"data.{name}.images={conversion.splits[name].images}"
        )

"""Commands `maskrcnn data convert ...`."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....model.config.option_types import OUTPUT_FOLDER

if TYPE_CHECKING:
    from .conversion import ForeignDataset, WrittenSplit

_FOLDER = click.argument(
    "folder", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR"
)
_OUT = click.argument("out", type=OUTPUT_FOLDER, metavar="OUT")
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace existing files in OUT.")


@click.group()
def convert() -> None:
    """Convert annotations of another format to COCO files.

    Writes a file per split, such as train.json, to OUT. Images are not copied. For each split, the
    command prints the KEY=VALUE arguments with which `maskrcnn train` uses the file and its images.
    """


@convert.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True), metavar="DIR")
@_OUT
@_OVERWRITE
def auto(folder: Path, out: Path, overwrite: bool) -> None:
    """Recognise the layout of a data set, and convert its annotations.

    DIR is a data set in the layout of COCO, Roboflow, CVAT, LabelMe or YOLO. `maskrcnn train
    finetune` and `maskrcnn data inspect` read these layouts without conversion. Each split is
    written to OUT/SPLIT.json. The annotations of COCO files are copied without checks or repairs;
    `maskrcnn data inspect` reports invalid ones.
    """
    from ..coco.dataset import summary_of
    from .conversion import write_splits
    from .labelme import is_labelme_file
    from .layouts import recognize_layout

    layout = recognize_layout(folder)
    click.echo(f"{folder}: {layout.name}")
    contents = {name: split.content for name, split in layout.splits.items()}
    for name, split in layout.splits.items():
        path = out / f"{name}.json"
        if split.annotations.is_dir() and is_labelme_file(path):
            raise click.ClickException(
                f"{path} is an annotation file of LabelMe, not of an earlier conversion; choose "
                "another folder"
            )
    sources = [split.annotations for split in layout.splits.values()]
    for name, file in write_splits(out, contents, overwrite=overwrite, sources=sources).items():
        _report(name, file, layout.splits[name].images)
        if file.faults:
            click.echo(f"left out of the split {name}: {summary_of(file.faults)}", err=True)


@convert.command()
@_FOLDER
@_OUT
@_OVERWRITE
def cityscapes(folder: Path, out: Path, overwrite: bool) -> None:
    """Convert the fine annotations of Cityscapes.

    DIR contains gtFine and leftImg8bit. The 8 classes of the instance segmentation benchmark keep
    their ids. Groups such as cargroup become crowds.
    """
    from .cityscapes import cityscapes as read_folder

    _convert(read_folder, folder, out, overwrite)


@convert.command()
@_FOLDER
@_OUT
@_OVERWRITE
def voc(folder: Path, out: Path, overwrite: bool) -> None:
    """Convert the segmented images of Pascal VOC.

    DIR is a folder such as VOCdevkit/VOC2012. Objects marked as difficult become crowds: training
    and evaluation ignore them.
    """
    from .voc import voc as read_folder

    _convert(read_folder, folder, out, overwrite)


def _convert(
    read_folder: "Callable[[Path], ForeignDataset]", folder: Path, out: Path, overwrite: bool
) -> None:
    from rich.progress import Progress

    from .conversion import write_coco_files

    dataset = read_folder(folder)
    with Progress() as progress:
        total = sum(len(split.sources) for split in dataset.splits.values())
        task = progress.add_task("converting", total=total)
        written = write_coco_files(
            dataset, out, overwrite=overwrite, on_image=lambda: progress.advance(task)
        )
    for name, file in written.items():
        _report(name, file, dataset.splits[name].images)


def _report(name: str, file: "WrittenSplit", images: Path) -> None:
    """Print a written file's path, its numbers of images and objects, and arguments for training.

    The arguments make `maskrcnn train` use the file. `name` is the name of the split, and `images`
    is the split's image folder.
    """
    is_held_out = any(word in name.lower() for word in ("val", "test"))
    key = "data.val" if is_held_out else "data.train"
    paths = {"annotations": file.path, "images": images}
    arguments = " ".join(shlex.quote(f"{key}.{part}={path}") for part, path in paths.items())
    click.echo(f"{file.path}: {file.counts}; use it with {arguments}")

"""Commands `maskrcnn data split`, `merge` and `filter`."""

import csv
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....model.config.option_types import OUTPUT_FILE, OUTPUT_FOLDER, FiniteRange

if TYPE_CHECKING:
    from ..convert.conversion import WrittenSplit

_FILE = click.argument(
    "file", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE"
)
_OUT_FILE = click.argument("out", type=OUTPUT_FILE, metavar="OUT")
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace existing files.")


@click.command()
@_FILE
@click.argument("out", type=OUTPUT_FOLDER, metavar="OUT")
@click.option(
    "--val",
    type=FiniteRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Share of the images for validation.",
)
@click.option(
    "--test",
    type=FiniteRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of the images for a test set.",
)
@_OVERWRITE
def split(file: Path, out: Path, val: float, test: float, overwrite: bool) -> None:
    """Divide a COCO annotation file.

    Writes OUT/train.json, and OUT/val.json and OUT/test.json if their shares are above 0. Each
    image is assigned to a file by a hash of the image's name, so the assignment stays the same when
    the data set grows. Images are not copied. If OUT/images contains the images or is a link to
    their folder, `maskrcnn train finetune OUT` trains on the new files.
    """
    shares = {name: share for name, share in (("val", val), ("test", test)) if share > 0}
    if not 0 < sum(shares.values()) < 1:
        raise click.UsageError("the sum of --val and --test must be above 0 and below 1")

    from ....model.plurals import counted
    from ..coco.dataset import read_coco_file
    from ..convert.conversion import write_splits
    from .split_merge_filter import split_content

    whole = read_coco_file(file)
    parts = split_content(whole, shares)
    if not any(part.content["images"] for part in parts.values()):
        raise click.ClickException(
            f"{file} lists no image with id and file name; add the images to its array 'images'"
        )
    contents = {name: partial(parts.__getitem__, name) for name in parts}
    splits = write_splits(out, contents, overwrite=overwrite, sources=[file])
    kept = sum(len(part.content["annotations"]) for part in parts.values())
    for name, written in splits.items():
        _report(written)
        if kept and not parts[name].content["annotations"]:
            click.echo(
                f"the new file {written.path} has no annotations, because {file} has too few "
                "images for these shares; change --val or --test",
                err=True,
            )
    if not whole["annotations"]:
        click.echo(f"{file} has no annotations; annotate its images before you train", err=True)
    if lost := len(whole["annotations"]) - kept:
        click.echo(
            f"left out: {counted(lost, 'annotation')} without a valid image in {file}", err=True
        )


@click.command()
@_OUT_FILE
@click.option(
    "--images",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    multiple=True,
    help="Image folder of a data set. Give one for each --annotations, in the same order.",
)
@click.option(
    "--annotations",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    multiple=True,
    help="COCO annotation file of a data set. Repeat the option for each data set.",
)
@_OVERWRITE
def merge(
    out: Path, images: tuple[Path, ...], annotations: tuple[Path, ...], overwrite: bool
) -> None:
    """Merge COCO annotation files into the file OUT.

    Classes of the same name become one. If several annotation files list the same image, OUT has
    one image with all its annotations, and equal annotations become one. Images are not copied. The
    image folder of OUT is the deepest folder that contains all image folders. File names in OUT are
    relative to this folder. If OUT is in this folder, `maskrcnn train finetune OUT` accepts OUT.
    """
    if len(images) != len(annotations) or len(images) < 2:
        raise click.UsageError("give --images and --annotations for each of two or more data sets")

    from ....model.plurals import counted
    from ..coco.categories import similar_names
    from ..coco.dataset import read_coco_file
    from ..convert.conversion import write_coco_file
    from .split_merge_filter import merge_contents, repeated_classes

    _prepare(out, overwrite)
    contents = [read_coco_file(file) for file in annotations]
    merged = merge_contents([*zip(images, contents, strict=True)])
    _report(write_coco_file(out, merged.source))
    if missing := merged.missing:
        click.echo(
            f"{out} lists {counted(len(missing), 'image')} whose file does not exist, such as "
            f"{merged.root / missing[0]}",
            err=True,
        )
    for file, content in zip(annotations, contents, strict=True):
        for name, ids in repeated_classes(content).items():
            click.echo(
                f"merged the {len(ids)} categories of {file} that are named {name!r} (ids "
                f"{', '.join(map(str, ids))})",
                err=True,
            )
    for similar in similar_names(
        category["name"] for category in merged.source.content["categories"]
    ):
        click.echo(f"class names differ only in case or blanks: {similar}", err=True)
    arguments = f"data.train.annotations={out}", f"data.train.images={merged.root}"
    click.echo(f"to train on {out}, run `maskrcnn train CONFIG {shlex.join(arguments)}`")


@click.command(name="filter")
@_FILE
@_OUT_FILE
@click.option(
    "--classes",
    metavar="NAME,...",
    help="Keep only these classes, with unchanged ids. Put a name that contains a comma, or begins "
    "or ends with a blank, in double quotes. If several classes have the same name, NAME selects "
    "all of them, and 'NAME (ID)' selects one.",
)
@click.option(
    "--min-area",
    type=FiniteRange(0),
    default=0.0,
    help="Drop annotations with a smaller area, in square pixels.",
)
@click.option("--drop-empty", is_flag=True, help="Drop images without annotations.")
@_OVERWRITE
def filter_(
    file: Path, out: Path, classes: str | None, min_area: float, drop_empty: bool, overwrite: bool
) -> None:
    """Write selected classes, annotations and images of a COCO annotation file to OUT."""
    if classes is None and not min_area and not drop_empty:
        raise click.UsageError("no filter is given; add --classes, --min-area or --drop-empty")

    from ..coco.dataset import read_coco_file
    from ..convert.conversion import write_coco_file
    from .split_merge_filter import filter_content

    _prepare(out, overwrite)
    names = None if classes is None else _names_in(classes)
    filtered = filter_content(
        read_coco_file(file), classes=names, min_area=min_area, drop_empty=drop_empty
    )
    written = write_coco_file(out, filtered)
    _report(written)
    if not written.images:
        click.echo(f"no image is left in {out}; relax the filters", err=True)


def _names_in(text: str) -> list[str]:
    """Return the class names in a list with commas. Names in double quotes may contain commas.

    Blanks before unquoted names are removed. Blanks in quotes and after names are kept.

    Raises:
        click.BadParameter: The list contains a line break outside double quotes.
    """
    try:
        (names,) = csv.reader([text], skipinitialspace=True)
    except csv.Error:
        raise click.BadParameter(
            f"{text!r} contains a line break outside double quotes; put each name that contains a "
            "comma or a line break in double quotes",
            param_hint="--classes",
        ) from None
    return names or [text]


def _prepare(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise click.ClickException(f"{path} exists; choose another file, or pass --overwrite")
    path.parent.mkdir(parents=True, exist_ok=True)


def _report(file: "WrittenSplit") -> None:
    from ..coco.dataset import summary_of

    click.echo(f"{file.path}: {file.counts}")
    if file.faults:
        click.echo(f"left out invalid entries: {summary_of(file.faults)}", err=True)

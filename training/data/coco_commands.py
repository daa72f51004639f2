"""Commands that bring COCO: `maskrcnn data download`, `verify` and `extract`."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

from ...model.option_types import FiniteRange
from .coco_files import BASE_URL, Edition, Part

if TYPE_CHECKING:
    from .disk import ByteProgress

_EDITIONS = ("coco2014", "coco2017")
_PARTS = ("train", "val", "annotations")


def _base_url_from_text(context: click.Context, parameter: click.Parameter, text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise click.BadParameter(f"{text!r} does not begin with http:// or https://")
    return text.rstrip("/")


def _md5s_from_path(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> dict[str, str]:
    """MD5 by file name, as `md5sum` writes them."""
    md5s = {}
    for line in path.read_text(errors="replace").splitlines() if path else ():
        match = re.fullmatch(r"([0-9a-fA-F]{32}) [ *](?:.*/)?([^/]+)", line)
        if match is None:
            raise click.BadParameter(f"{path}: {line!r} is not of md5sum's form `MD5  FILE`")
        md5s[match[2]] = match[1].lower()
    return md5s


def _coco_arguments(command: Callable[..., None]) -> Callable[..., None]:
    for decorate in (
        click.option(
            "--part",
            "names",
            multiple=True,
            type=click.Choice(_PARTS),
            help="A part of it; may be given several times. All, if not given.",
        ),
        click.argument("root", type=click.Path(path_type=Path, file_okay=False), metavar="DIR"),
        click.argument("edition", type=click.Choice(_EDITIONS)),
    ):
        command = decorate(command)
    return command


_CHECKSUMS = click.option(
    "--checksums",
    "md5s",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_md5s_from_path,
    help="What md5sum says of the archives of a mirror that packed its own.",
)


@click.command()
@_coco_arguments
@click.option("--extract", "extracting", is_flag=True, help="Extract what was downloaded.")
@click.option(
    "--base-url",
    default=BASE_URL,
    show_default=True,
    callback=_base_url_from_text,
    help="A mirror with the same paths below.",
)
@_CHECKSUMS
@click.option(
    "--timeout",
    type=FiniteRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds without data, or next to none, after which to connect anew.",
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Fruitless attempts in a row after the first; the pause between them doubles from 1 s.",
)
def download(
    edition: Edition,
    root: Path,
    names: tuple[Part, ...],
    extracting: bool,
    base_url: str,
    md5s: dict[str, str],
    timeout: float,
    retries: int,
) -> None:
    """Download the archives of COCO into DIR.

    An archive has its name when it is whole and its checksum is right; until then it is
    NAME.partial, from which the same command goes on. The three of coco2017 have 20.4 GB, those of
    coco2014 the same, and extracted as much again.

    The reference implementations train on train2014 and valminusminival2014 and test on
    minival2014: these are the images of train2017 and val2017, so take coco2017.
    """
    from .coco_files import coco_parts
    from .downloading import Patience, download_file

    parts = coco_parts(edition, names, md5s)
    root.mkdir(parents=True, exist_ok=True)
    with _bars() as show:
        for part in parts.values():
            download_file(
                f"{base_url}/{part.address}",
                part.archive_in(root),
                md5=part.md5,
                size=part.size,
                patience=Patience(timeout=timeout, retries=retries),
                on_progress=show,
            )
    for part in parts.values():
        click.echo(f"{part.archive_in(root)} is whole: its MD5 is {part.md5}")
    if extracting:
        _extract(edition, root, names)


@click.command()
@_coco_arguments
def extract(edition: Edition, root: Path, names: tuple[Part, ...]) -> None:
    """Extract the archives of COCO in DIR beside them.

    Makes DIR/train2017, DIR/val2017 and DIR/annotations, or those of 2014. What is there and right
    is left alone, what is missing or altered is replaced; the archives stay.
    """
    _extract(edition, root, names)


def _extract(edition: Edition, root: Path, names: tuple[Part, ...]) -> None:
    from .coco_files import coco_parts
    from .extracting import extract_archive

    counts = {}
    with _bars() as show:
        for part in coco_parts(edition, names).values():
            folder = part.folder_in(root)
            counts[folder] = extract_archive(part.archive_in(root), folder, show)
    for folder, count in counts.items():
        click.echo(f"{folder} is whole; newly extracted files: {count}")


@click.command()
@_coco_arguments
@_CHECKSUMS
@click.option("--images", "decode", is_flag=True, help="Decode images whose archive is not there.")
@click.pass_context
def verify(
    context: click.Context,
    edition: Edition,
    root: Path,
    names: tuple[Part, ...],
    md5s: dict[str, str],
    decode: bool,
) -> None:
    """Check the archives and extracted folders of COCO in DIR.

    Archives are compared with the published checksums; folders with their archives or, where these
    are not kept, with the annotations. Ends with exit code 1 if something is wrong, and says which
    command mends it.
    """
    from .coco_files import coco_parts
    from .verifying import verify_part

    findings = []
    with _bars() as show:
        for name, part in coco_parts(edition, names, md5s).items():
            findings += verify_part(edition, name, part, root, decode=decode, on_progress=show)
    table = Table("part")
    table.add_column("state", overflow="fold")
    for finding in findings:
        table.add_row(finding.path.name, finding.fault or "right")
    # Paths may look like markup.
    Console(markup=False, emoji=False, highlight=False).print(table)
    faulty = [finding for finding in findings if finding.fault is not None]
    for finding in faulty:
        click.echo(f"{finding.path}: mend it with\n  {finding.remedy}")
    if faulty:
        context.exit(1)


@contextmanager
def _bars() -> "Iterator[ByteProgress]":
    """Progress bars, one for every step."""
    # On a narrow terminal the bars give way.
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def show(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step)
            progress.update(tasks[step], completed=done, total=total)

        yield show

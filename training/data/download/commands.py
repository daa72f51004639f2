"""Commands `maskrcnn data download`, `verify` and `extract`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import click
from rich.table import Table

from ....model.config.option_types import OUTPUT_FOLDER, FiniteRange
from ....model.download.progress_bars import progress_bars
from ....plugins.runtime.console import table_console
from .coco_archives import BASE_URL, Edition, Part


def _base_url_from_text(context: click.Context, parameter: click.Parameter, text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise click.BadParameter(f"{text!r} does not begin with http:// or https://")
    return text.rstrip("/")


def _md5s_from_path(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> dict[str, str]:
    """Parse a file with output of `md5sum`. Return MD5 by file name."""
    if path is None:
        return {}
    from ....model.download.checksums import read_checksums

    try:
        checksums = read_checksums(path)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    for name, checksum in checksums.items():
        if checksum.algorithm != "md5":
            raise click.BadParameter(f"{path}: the checksum of {name} is not an MD5; use md5sum")
    return {name: checksum.digest for name, checksum in checksums.items()}


# Type of the argument DIR of a command that only reads the folder.
_INPUT_FOLDER = click.Path(path_type=Path, file_okay=False)


def _coco_arguments(
    command: Callable[..., None], folder_type: click.Path = OUTPUT_FOLDER
) -> Callable[..., None]:
    for decorate in (
        click.option(
            "--part",
            "parts",
            multiple=True,
            type=click.Choice(get_args(Part)),
            help="Part to process. Repeat the option for several parts. Default: all parts.",
        ),
        click.argument("root", type=folder_type, metavar="DIR"),
        click.argument("edition", type=click.Choice(get_args(Edition))),
    ):
        command = decorate(command)
    return command


_CHECKSUMS = click.option(
    "--checksums",
    "md5s",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_md5s_from_path,
    help="Output file of md5sum, for mirrored archives that differ from the published archives.",
)


@click.command()
@_coco_arguments
@click.option("--extract", "and_extract", is_flag=True, help="Also extract the archives.")
@click.option(
    "--base-url",
    default=BASE_URL,
    show_default=True,
    callback=_base_url_from_text,
    help="URL of a mirror of COCO with the same paths.",
)
@_CHECKSUMS
@click.option(
    "--timeout",
    type=FiniteRange(0, 86_400, min_open=True),
    default=30.0,
    show_default=True,
    help="Reconnect if the server sends little or no data for this many seconds.",
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Maximum number of consecutive retries. The pause before the first retry is 1 s, and each "
    "further pause is twice as long, up to 60 s.",
)
def download(
    edition: Edition,
    root: Path,
    parts: tuple[Part, ...],
    and_extract: bool,
    base_url: str,
    md5s: dict[str, str],
    timeout: float,
    retries: int,
) -> None:
    """Download the archives of COCO into DIR.

    An archive is named NAME.partial until it is complete with the right MD5. If the command is
    interrupted, run it again to resume. The archives of each edition take 20.4 GB, and the
    extracted files another 20.4 GB.

    maskrcnn-benchmark trains on train2014 and valminusminival2014, and tests on minival2014.
    coco2017 has the same images: those for training in train2017, and those for testing in val2017.
    """
    from ....model.download.checksums import Checksum
    from ....model.download.http_download import Remedies, RetryPolicy, download_file
    from .coco_archives import coco_archives

    archives = coco_archives(edition, parts, md5s)
    remedies = Remedies(
        other_source="use a mirror (--base-url)", trust="pass its MD5 with --checksums"
    )
    root.mkdir(parents=True, exist_ok=True)
    with progress_bars() as show:
        for archive in archives.values():
            download_file(
                f"{base_url}/{archive.address}",
                root / archive.name,
                checksum=Checksum("md5", archive.md5),
                remedies=remedies,
                size=archive.size,
                policy=RetryPolicy(timeout=timeout, retries=retries),
                on_progress=show,
            )
    for archive in archives.values():
        click.echo(f"{root / archive.name} is complete; MD5 {archive.md5}")
    if and_extract:
        _extract(edition, root, parts)


@click.command()
@_coco_arguments
def extract(edition: Edition, root: Path, parts: tuple[Part, ...]) -> None:
    """Extract the downloaded archives of COCO in DIR.

    Creates DIR/train2017, DIR/val2017 and DIR/annotations (for coco2014, DIR/train2014 etc.). If
    these folders exist, only missing and altered files are extracted. The archives are not deleted.
    """
    _extract(edition, root, parts)


def _extract(edition: Edition, root: Path, parts: tuple[Part, ...]) -> None:
    from .coco_archives import coco_archives
    from .extraction import extract_archive

    counts = {}
    with progress_bars() as show:
        for archive in coco_archives(edition, parts).values():
            folder = root / archive.folder
            counts[folder] = extract_archive(root / archive.name, folder, show)
    for folder, count in counts.items():
        click.echo(f"{folder} is complete; extracted files: {count}")


@click.command()
@partial(_coco_arguments, folder_type=_INPUT_FOLDER)
@_CHECKSUMS
@click.option(
    "--images",
    "decode",
    is_flag=True,
    help="Decode images that cannot be compared with an archive.",
)
@click.pass_context
def verify(
    context: click.Context,
    edition: Edition,
    root: Path,
    parts: tuple[Part, ...],
    md5s: dict[str, str],
    decode: bool,
) -> None:
    """Check the downloaded archives and extracted folders of COCO in DIR.

    Archives are compared with the checksums of the published files. Folders are compared with their
    archives or, if these were deleted, with the annotations. If a check fails, the command prints
    how to repair the archive or folder, and exits with code 1.
    """
    from .coco_archives import coco_archives
    from .verification import verify_part

    results = []
    with progress_bars() as show:
        for part, archive in coco_archives(edition, parts, md5s).items():
            results += verify_part(edition, part, archive, root, decode=decode, on_progress=show)
    table = Table("part")
    table.add_column("state", overflow="fold")
    for result in results:
        table.add_row(result.path.name, result.fault or "intact")
    table_console().print(table)
    faulty = [result for result in results if result.fault is not None]
    for result in faulty:
        click.echo(f"{result.path}: repair it with\n  {result.remedy}")
    if faulty:
        context.exit(1)

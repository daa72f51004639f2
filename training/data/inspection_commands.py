"""The command that reports what is in a data set: `maskrcnn data inspect`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..config import DatasetConfig
    from .inspection import Inspection


@click.command()
@click.argument(
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="[DIR]",
    required=False,
)
@click.option(
    "--images",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of the images, where there is no DIR of a known layout.",
)
@click.option(
    "--annotations",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="COCO instances file that belongs to --images.",
)
@click.option("--decode", is_flag=True, help="Decode every image too, some milliseconds each.")
@click.option(
    "--min-size",
    type=click.IntRange(32),
    default=800,
    show_default=True,
    help="Shorter side that the model will be given, as data.min_size.",
)
@click.option(
    "--max-size",
    type=click.IntRange(32),
    default=1333,
    show_default=True,
    help="Longer side at most, as data.max_size.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report, with every finding, to this file too.",
)
@click.option(
    "-o",
    "--output",
    "picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw samples into this PNG, suspicious ones first.",
)
@click.option(
    "--samples", type=click.IntRange(1, 100), default=16, show_default=True, help="How many."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Fixes which samples."
)
def inspect(
    folder: Path | None,
    images: Path | None,
    annotations: Path | None,
    decode: bool,
    min_size: int,
    max_size: int,
    json_path: Path | None,
    picture: Path | None,
    samples: int,
    seed: int,
) -> None:
    """Report what is in a data set, and what looks wrong.

    DIR holds annotations/[instances_]SPLIT.json and the images of each split in SPLIT/. Findings
    are no failure: the command fails only if the data set cannot be used.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from .coco import CocoDataset
    from .inspection import LoadedSplit, inspect_splits
    from .inspection_tables import tables_from

    splits = {}
    for name, config in _splits_in(folder, images, annotations).items():
        with Console(stderr=True).status(Text(f"reading {config.annotations}")):
            splits[name] = LoadedSplit(config, CocoDataset(config))
    datasets = [split.dataset for split in splits.values()]
    with Progress(disable=not decode) as progress:
        task = progress.add_task("decoding", total=sum(map(len, datasets)))
        inspection = inspect_splits(
            splits,
            min_size=min_size,
            max_size=max_size,
            decode=decode,
            on_image=lambda: progress.advance(task),
        )
    # Names of classes and files may look like markup.
    Console(markup=False, emoji=False).print(*tables_from(inspection), sep="\n")
    if json_path is not None:
        _write_json(inspection, json_path)
        click.echo(f"the report with every finding is {json_path}")
    if picture is not None:
        from .inspection_picture import choose_samples, draw_samples

        draw_samples(choose_samples(datasets, inspection.suspicions, samples, seed), picture)
        click.echo(f"samples are drawn in {picture}")


def _splits_in(
    folder: Path | None, images: Path | None, annotations: Path | None
) -> "dict[str, DatasetConfig]":
    from ..config import DatasetConfig
    from .layout import find_splits

    if folder is not None and images is None and annotations is None:
        return find_splits(folder)
    if folder is None and images is not None and annotations is not None:
        return {annotations.stem: DatasetConfig(images=images, annotations=annotations)}
    raise click.UsageError("give either DIR, or both --images and --annotations")


def _write_json(inspection: "Inspection", path: Path) -> None:
    from dataclasses import asdict

    splits = {name: asdict(split) for name, split in inspection.splits.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"splits": splits, "files": inspection.files}, indent=2) + "\n")

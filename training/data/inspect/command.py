"""Command `maskrcnn data inspect`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....model.config.option_types import JSON_FILE, OUTPUT_FILE

if TYPE_CHECKING:
    from ..coco.dataset import CocoDataset
    from ..convert.layouts import LayoutSplit
    from .report import DatasetReport


@click.command()
@click.argument(
    "folder",
    type=click.Path(path_type=Path, exists=True),
    metavar="[DIR]",
    required=False,
)
@click.option(
    "--images",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Image folder. Give it together with --annotations, instead of DIR.",
)
@click.option(
    "--annotations",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="COCO instances file of the images in --images.",
)
@click.option("--decode", is_flag=True, help="Also decode each image (some milliseconds each).")
@click.option(
    "--min-size",
    type=click.IntRange(32),
    default=800,
    show_default=True,
    help="Shorter side of the model input, as in data.min_size.",
)
@click.option(
    "--max-size",
    type=click.IntRange(32),
    default=1333,
    show_default=True,
    help="Longest side of the model input, as in data.max_size.",
)
@click.option(
    "--json",
    "json_path",
    type=JSON_FILE,
    help="Also write the report, with all findings, to this file.",
)
@click.option(
    "-o",
    "--output",
    "grid_path",
    type=OUTPUT_FILE,
    help="Draw sample images with annotations into this PNG file, suspicious ones first.",
)
@click.option(
    "--augmented",
    metavar="CONFIG",
    help="Also draw training images, resized and augmented as this preset or YAML file says. With "
    "-o NAME.png, they are written to NAME-augmented.png.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 100),
    default=16,
    show_default=True,
    help="Number of sample images.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed for the choice of sample images.",
)
def inspect(
    folder: Path | None,
    images: Path | None,
    annotations: Path | None,
    decode: bool,
    min_size: int,
    max_size: int,
    json_path: Path | None,
    grid_path: Path | None,
    augmented: str | None,
    samples: int,
    seed: int,
) -> None:
    """Print statistics of a data set, and report invalid and suspicious entries.

    DIR is a data set in the layout of COCO (annotations/[instances_]SPLIT.json, and the images of
    each split in SPLIT/), Roboflow, CVAT, LabelMe or YOLO. It can also be a COCO file whose images
    are beside it, or the YAML file of a YOLO data set. The exit code is 0 even if there are invalid
    or suspicious entries.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from ....plugins.runtime.console import table_console
    from ...config import validated_config

    if max_size < min_size:
        raise click.UsageError(
            f"--max-size {max_size} is below --min-size {min_size}; change one of the two"
        )
    if augmented is not None and grid_path is None:
        raise click.UsageError("--augmented needs -o FILE")
    if grid_path is not None and grid_path.suffix.lower() != ".png":
        raise click.UsageError(
            f"-o {grid_path}: sample images are written in PNG format; give a name that ends with "
            ".png"
        )
    settings = None if augmented is None else validated_config(augmented).data

    from .report import inspect_splits
    from .report_tables import tables_from

    augmented_path = None
    if grid_path is not None and settings is not None:
        augmented_path = grid_path.with_stem(f"{grid_path.stem}-augmented")
    splits = {}
    sources = _splits_in(folder, images, annotations)
    for name, split in sources.items():
        with Console(stderr=True).status(Text(f"reading {split.annotations}")):
            splits[name] = split.load()
    datasets = [*splits.values()]
    for output in (json_path, grid_path, augmented_path):
        if output is not None and output.exists():
            _check_is_no_input(output, sources.values(), datasets)
    with Progress(disable=not decode) as progress:
        task = progress.add_task("decoding", total=sum(map(len, datasets)))
        report = inspect_splits(
            splits,
            min_size=min_size,
            max_size=max_size,
            decode=decode,
            on_image=lambda: progress.advance(task),
        )
    table_console().print(*tables_from(report), sep="\n")
    if json_path is not None:
        _write_json(report, json_path)
        click.echo(f"wrote the report with all findings to {json_path}")
    if grid_path is not None:
        from .sample_grid import choose_samples, draw_samples

        draw_samples(choose_samples(datasets, report.suspicions, samples, seed), grid_path)
        click.echo(f"wrote sample images to {grid_path}")
    if augmented_path is not None and settings is not None:
        from ..coco.splits import splits_named
        from .augmented_samples import augmented_samples

        train = [splits[name] for name in splits_named(splits, "train")]
        drawn = augmented_samples((train or datasets)[0], settings, samples, seed)
        draw_samples(drawn, augmented_path)
        click.echo(f"wrote augmented training images to {augmented_path}")


def _splits_in(
    folder: Path | None, images: Path | None, annotations: Path | None
) -> "Mapping[str, LayoutSplit]":
    from ..convert.layouts import LayoutSplit, recognize_layout

    if folder is not None and images is None and annotations is None:
        layout = recognize_layout(folder)
        click.echo(f"{folder}: {layout.name}")
        return layout.splits
    if folder is None and images is not None and annotations is not None:
        return {annotations.stem: LayoutSplit(images, annotations)}
    raise click.UsageError("give either DIR, or both --images and --annotations")


def _check_is_no_input(
    output: Path, splits: "Iterable[LayoutSplit]", datasets: "Iterable[CocoDataset]"
) -> None:
    """Check that an existing output file is not one of a data set's images or annotation files.

    A PNG file in an image folder counts as an image, unless an earlier call of this command wrote
    it.

    Raises:
        click.UsageError: The output would replace a file of the data set.
    """
    from ..convert.labelme import is_labelme_file
    from .sample_grid import is_sample_grid

    splits = [*splits]
    inputs = [split.annotations for split in splits]
    inputs += [record.path for dataset in datasets for record in dataset.records]
    # The annotations of LabelMe are a folder, which may also hold earlier reports.
    is_annotation = is_labelme_file(output)
    is_listed = any(path.exists() and path.samefile(output) for path in inputs)
    is_image = (
        output.suffix.lower() == ".png"
        and any(output.resolve().is_relative_to(split.images.resolve()) for split in splits)
        and not is_sample_grid(output)
    )
    if is_annotation or is_listed or is_image:
        raise click.UsageError(
            f"{output} is a file of the data set and would be replaced; choose another file"
        )


def _write_json(report: "DatasetReport", path: Path) -> None:
    from dataclasses import asdict

    splits = {name: asdict(split) for name, split in report.splits.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"splits": splits, "files": report.files}, indent=2) + "\n")

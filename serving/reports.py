"""What `predict` and `client` leave behind: pictures and COCO results."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from PIL import Image
from rich.console import Console
from rich.progress import track

from ..model.images import IMAGE_SUFFIXES, ImageError, decode_image
from .coco_json import coco_results, image_id_from_path
from .detections import Detections
from .drawing import draw_detections
from .errors import RefusedError

RESULTS_NAME = "detections.json"


def image_files(sources: Sequence[Path]) -> list[Path]:
    """The images among files and folders; of a folder those whose names end as images' do.

    Raises:
        click.UsageError: there are none, or two of the same name whose results would collide.
    """
    files: dict[str, Path] = {}
    for source in sources:
        found = [source]
        if source.is_dir():
            found = sorted(p for p in source.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
        for path in found:
            other = files.setdefault(path.stem, path)
            if other != path:
                raise click.UsageError(
                    f"{other} and {path} would write the same results; give one at a time"
                )
    if not files:
        raise click.UsageError(
            f"{', '.join(map(str, sources))} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})"
        )
    return list(files.values())


def write_report(
    files: Sequence[Path],
    outcomes: Iterable[Detections | ImageError | RefusedError],
    folder: Path,
) -> None:
    """Write a picture of each image's detections, and all of them as COCO results.

    Args:
        files: The images.
        outcomes: In the same order, their detections or why there are none.
        folder: Where to write; made if missing.

    Raises:
        click.ClickException: some images failed, all others are written.
    """
    pictures = [folder / f"{path.stem}.png" for path in files]
    overwritten = {path.resolve() for path in files} & {path.resolve() for path in pictures}
    if overwritten:
        raise click.UsageError(
            f"{overwritten.pop()} would be overwritten; choose another folder with --output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    results, failures = [], 0
    pairs = zip(files, pictures, outcomes, strict=True)
    for path, picture, outcome in track(pairs, "Detecting", len(files), console=console):
        if isinstance(outcome, Detections):
            results += coco_results(image_id_from_path(path), outcome)
            image = decode_image(path.read_bytes(), max_pixels=outcome.height * outcome.width)
            Image.fromarray(draw_detections(image, outcome)).save(picture)
        else:
            failures += 1
            console.print(f"{path}: {outcome}", style="red", markup=False, soft_wrap=True)
    (folder / RESULTS_NAME).write_text(json.dumps(results))
    click.echo(f"{len(results)} detections in {len(files) - failures} images, see {folder}")
    if failures:
        raise click.ClickException(f"{failures} of {len(files)} images failed")

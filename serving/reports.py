"""What `predict` and `client` leave behind: pictures, COCO results and arrays."""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track

from ..model.images import IMAGE_SUFFIXES, ImageError, decode_image
from .coco_json import coco_results, image_id_from_path
from .config import ReportFormat
from .detections import Detections
from .drawing import draw_detections
from .errors import RefusedError
from .numpy_arrays import arrays_from_detections

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
    formats: Collection[ReportFormat] = ("pictures", "coco"),
) -> None:
    """Write each image's detections as they come.

    Args:
        files: The images.
        outcomes: In the same order, their detections or why there are none.
        folder: Where to write; made if missing.
        formats: `pictures`, a PNG of each image with its detections; `coco`, all of them as COCO
            results; `numpy`, an NPZ of each image with `numpy_arrays.arrays_from_detections`.

    Raises:
        click.ClickException: some images failed, all others are written.
    """
    _check_overwrites(files, folder, formats)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    results, count, failures = [], 0, 0
    pairs = zip(files, outcomes, strict=True)
    for path, outcome in track(pairs, "Detecting", len(files), console=console):
        if not isinstance(outcome, Detections):
            failures += 1
            console.print(f"{path}: {outcome}", style="red", markup=False, soft_wrap=True)
            continue
        count += len(outcome)
        if "coco" in formats:
            results += coco_results(image_id_from_path(path), outcome)
        if "pictures" in formats:
            _write_picture(path, outcome, folder)
        if "numpy" in formats:
            arrays: dict[str, Any] = arrays_from_detections(outcome)
            np.savez_compressed(folder / f"{path.stem}.npz", **arrays)
    if "coco" in formats:
        (folder / RESULTS_NAME).write_text(json.dumps(results))
    click.echo(f"{count} detections in {len(files) - failures} images, see {folder}")
    if failures:
        raise click.ClickException(f"{failures} of {len(files)} images failed")


def _check_overwrites(
    files: Sequence[Path], folder: Path, formats: Collection[ReportFormat]
) -> None:
    if "pictures" not in formats:
        return
    pictures = {(folder / f"{path.stem}.png").resolve() for path in files}
    overwritten = pictures & {path.resolve() for path in files}
    if overwritten:
        raise click.UsageError(
            f"{overwritten.pop()} would be overwritten; choose another folder with --output"
        )


def _write_picture(path: Path, detections: Detections, folder: Path) -> None:
    image = decode_image(path.read_bytes(), max_pixels=detections.height * detections.width)
    picture = Image.fromarray(draw_detections(image, detections))
    picture.save(folder / f"{path.stem}.png")

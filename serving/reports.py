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
from .errors import ClientError, image_error_from_os_error
from .numpy_arrays import arrays_from_detections

RESULTS_NAME = "detections.json"

_FAILURES_SHOWN = 3
"""At the end; each is shown when it comes."""


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
    outcomes: Iterable[Detections | ImageError | ClientError | OSError],
    folder: Path,
    formats: Collection[ReportFormat] = ("pictures", "coco"),
) -> None:
    """Write each image's detections as they come.

    Whatever ends it before the last, the COCO results of those that came are written.

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
    report, failures = _Report(folder, formats), []
    console = Console(stderr=True, markup=False, emoji=False)
    pairs = zip(files, outcomes, strict=True)
    try:
        for path, outcome in track(pairs, "Detecting", len(files), console=console):
            failure = report.add(path, outcome)
            if failure:
                failures.append(f"{path}: {failure}")
                console.print(failures[-1], style="red", soft_wrap=True)
    finally:
        report.finish()
    if failures:
        raise click.ClickException(_sentences_from_failures(failures, len(files)))


class _Report:
    """What was found so far."""

    def __init__(self, folder: Path, formats: Collection[ReportFormat]) -> None:
        self._folder = folder
        self._formats = formats
        self._results: list[dict[str, Any]] = []
        self._images = 0
        self._detections = 0

    def add(self, path: Path, outcome: Detections | Exception) -> str:
        """Write what was found in an image, or say what failed."""
        if not isinstance(outcome, Detections):
            return _sentence_from_failure(outcome)
        self._detections += len(outcome)
        self._images += 1
        if "coco" in self._formats:
            self._results += coco_results(image_id_from_path(path), outcome)
        if "numpy" in self._formats:
            arrays: dict[str, Any] = arrays_from_detections(outcome)
            np.savez_compressed(self._folder / f"{path.stem}.npz", **arrays)
        if "pictures" in self._formats:
            try:
                picture = _drawn(path, outcome)
            except (OSError, ImageError) as error:  # it was replaced or went in the meantime
                return _sentence_from_failure(error)
            picture.save(self._folder / f"{path.stem}.png")
        return ""

    def finish(self) -> None:
        """Write the COCO results, at once in place of what was there, and say how much it is."""
        if "coco" in self._formats:
            partial = self._folder / f".{RESULTS_NAME}.partial"
            partial.write_text(json.dumps(self._results))
            partial.replace(self._folder / RESULTS_NAME)
        click.echo(f"{self._detections} detections in {self._images} images, see {self._folder}")


def _sentence_from_failure(error: Exception) -> str:
    return str(image_error_from_os_error(error) if isinstance(error, OSError) else error)


def _sentences_from_failures(failures: Sequence[str], images: int) -> str:
    more = len(failures) - _FAILURES_SHOWN
    shown = [*failures[:_FAILURES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n  ".join([f"{len(failures)} of {images} images failed:", *shown])


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


def _drawn(path: Path, detections: Detections) -> Image.Image:
    image = decode_image(path.read_bytes(), max_pixels=detections.height * detections.width)
    return Image.fromarray(draw_detections(image, detections))

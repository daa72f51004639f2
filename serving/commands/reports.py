"""Output files of the CLI's `predict` and `client`: annotated images, COCO JSON, NumPy arrays."""

import json
import os
from collections.abc import Collection, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track

from ...model.atomic_files import atomic_write, check_creatable
from ...model.exit_signals import exit_on_signals
from ...model.image_files import IMAGE_FILE_SUFFIXES, is_image_file, read_image_file
from ...model.image_limits import ImageError, image_error_from_os_error
from ...model.plurals import counted
from ..config import ReportFormat
from ..detections import Detections
from ..errors import ClientError
from ..result_formats import annotated_png, arrays_from_detections, coco_results, image_ids

RESULTS_NAME = "detections.json"

# Maximum number of failures in the final message. Each failure is also printed when it occurs.
_FAILURES_SHOWN = 3
# Lower-case suffixes of image formats that this package does not support.
_OTHER_SUFFIXES = frozenset({".avif", ".gif", ".heic", ".heif", ".jp2", ".jxl"})


def image_files(sources: Sequence[Path]) -> list[Path]:
    """Return all files among `sources`, and the image files in all folders among `sources`.

    A file among `sources` may have any suffix. In folders, only files with a suffix in
    `IMAGE_FILE_SUFFIXES` are used, and subfolders are not searched. A message is printed to
    standard error if images in unsupported formats are skipped, or if a folder holds images only in
    its subfolders.

    Raises:
        click.UsageError: There are no images.
    """
    files: dict[Path, None] = {}
    for source in sources:
        paths = [source]
        if source.is_dir():
            entries = sorted(source.iterdir())
            paths = [p for p in entries if is_image_file(p)]
            _report_skipped([p.name for p in entries if is_image_file(p, _OTHER_SUFFIXES)])
            if not paths:
                _report_nested(source)
        files |= dict.fromkeys(paths)
    if not files:
        suffixes = ", ".join(sorted(IMAGE_FILE_SUFFIXES))
        raise click.UsageError(f"{', '.join(map(str, sources))}: no image found ({suffixes})")
    return list(files)


def check_image_ids(files: Sequence[Path]) -> None:
    """Check that no two images would have the same COCO image ID.

    Raises:
        click.UsageError: Two images would have the same ID.
    """
    owners: dict[int | str, Path] = {}
    for path, image_id in zip(files, image_ids(files), strict=True):
        if image_id in owners:
            raise click.UsageError(
                f"{owners[image_id]} and {path} would both have the image ID {image_id} in the "
                "results; give them to separate runs with different --output folders"
            )
        owners[image_id] = path


def _report_skipped(names: Sequence[str]) -> None:
    """Print the number of skipped images and the names of the first three to standard error."""
    if names:
        shown = ", ".join(names[:_FAILURES_SHOWN])
        more = ", ..." if len(names) > _FAILURES_SHOWN else ""
        images = counted(len(names), "image")
        click.echo(f"skipping {images} in unsupported formats ({shown}{more})", err=True)


def _report_nested(folder: Path) -> None:
    """If subfolders contain images, warn that those images are not read, and name one image."""
    path = next(filter(is_image_file, folder.rglob("*")), None)
    if path is not None:
        click.echo(
            f"{folder}: images in subfolders, such as {path}, are not read; to read them, give the "
            "subfolders too",
            err=True,
        )


def check_folder(folder: Path, files: Sequence[Path], formats: Collection[ReportFormat]) -> None:
    """Check that an output folder is writable.

    If annotated images will be written, also check that the folder holds no input image.

    Raises:
        click.UsageError: The folder cannot be written or created. Or `formats` includes
            `pictures`, and `folder` holds an input image. If an input image is a symbolic link,
            both the link and its target count as input images.
    """
    try:
        check_creatable(folder)
    except OSError as error:
        raise click.UsageError(
            f"{folder}: {error.strerror}; choose another folder with --output"
        ) from None
    # If annotated images were in a folder of input images, the next run would use them as input.
    if "pictures" not in formats:
        return
    folders = {os.path.realpath(path.parent) for path in files}
    folders |= {os.path.dirname(os.path.realpath(path)) for path in files}
    if os.path.realpath(folder) in folders:
        raise click.UsageError(
            f"{folder} holds input images, so annotated images cannot be written to it; choose "
            "another folder with --output"
        )


def write_report(
    files: Sequence[Path],
    outcomes: Iterable[Detections | ImageError | ClientError | OSError],
    folder: Path,
    formats: Collection[ReportFormat] = ("pictures", "coco"),
) -> None:
    """Write the detections of images to files. Call this function from the main thread.

    The PNG and NPZ of an image are written as soon as its outcome arrives. The COCO file is written
    at the end, even if an error, SIGTERM or SIGHUP ends the run early. If no image has succeeded,
    the COCO file of an earlier run is not overwritten.

    Args:
        files: The image files.
        outcomes: Detections or error of each image, in the order of `files`.
        folder: Output folder, created if missing.
        formats: `pictures`: a PNG of each image with its detections. `coco`: one file of COCO
            results. `numpy`: an NPZ of each image with the arrays of `arrays_from_detections`. If
            two images have the same ID (see `image_ids`), the later PNG or NPZ overwrites the
            earlier one.

    Raises:
        click.ClickException: Some images failed. The results of successful images are written.
        OSError: A file could not be written. The message names the file. Files written before
            it stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report, failures = _Report(folder, formats, files), []
    # No markup: file names may contain square brackets and colons.
    console = Console(stderr=True, markup=False, emoji=False)
    pairs = zip(files, outcomes, strict=True)
    with exit_on_signals() as ignore_signals:
        try:
            for path, outcome in track(pairs, "Detecting", len(files), console=console):
                failure = report.add(path, outcome)
                if failure is not None:
                    failures.append(f"{path}: {failure}")
                    console.print(failures[-1], style="red", soft_wrap=True)
        finally:
            try:
                ignore_signals()
            finally:  # even if a signal interrupts `ignore_signals`
                report.finish()
    if failures:
        raise click.ClickException(_failure_summary(failures, len(files)))


class _Report:
    """Writer of a run's output files: annotated images, COCO results and NumPy arrays."""

    def __init__(
        self, folder: Path, formats: Collection[ReportFormat], files: Sequence[Path]
    ) -> None:
        self._folder = folder
        self._formats = formats
        self._ids = dict(zip(files, image_ids(files), strict=True))
        self._done = 0
        self._results: list[dict[str, Any]] = []
        self._images = 0
        self._detections = 0

    def add(self, path: Path, outcome: Detections | Exception) -> str | None:
        """Write the PNG and NPZ of an input image, and store its COCO results for `finish`.

        Return an error message if `outcome` is an error or the PNG cannot be drawn. Otherwise,
        return None.
        """
        self._done += 1
        if not isinstance(outcome, Detections):
            return _failure_message(outcome)
        self._detections += len(outcome)
        self._images += 1
        image_id = self._ids[path]
        stem = path.name if image_id == path.name else path.stem
        if "coco" in self._formats:
            self._results += coco_results(image_id, outcome)
        if "numpy" in self._formats:
            arrays: dict[str, Any] = arrays_from_detections(outcome)
            file = BytesIO()
            np.savez_compressed(file, **arrays)
            _write(self._folder / f"{stem}.npz", file.getvalue())
        if "pictures" in self._formats:
            try:
                # Raises an ImageError if the file has been replaced by one of another size.
                annotated = annotated_png(read_image_file(path), outcome)
            except (OSError, ImageError) as error:  # the input file was replaced or deleted
                return f"the annotated image was not drawn: {_failure_message(error)}"
            _write(self._folder / f"{stem}.png", annotated)
        return None

    def finish(self) -> None:
        """Write the COCO results and print the totals if at least one image has succeeded.

        If the run ended early, also print how many images were processed, including failed ones.
        """
        if self._done < len(self._ids):
            images = counted(len(self._ids), "image")
            click.echo(f"stopped after {self._done} of {images}", err=True)
        if not self._images:
            return
        if "coco" in self._formats:
            _write(self._folder / RESULTS_NAME, json.dumps(self._results).encode())
        detections, images = counted(self._detections, "detection"), counted(self._images, "image")
        # The name of the folder can have bytes that are not UTF-8.
        click.echo(f"{detections} in {images}, see {click.format_filename(self._folder)}")


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: The file cannot be written. The message names the file and a remedy.
    """
    try:
        # Not durable: results can be computed again, and flushing each image to disk is slow.
        with atomic_write(path, durable=False) as file:
            file.write(data)
    except OSError as error:
        remedy = "make space on the disk, or choose another folder with --output"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(path)) from error


def _failure_message(error: Exception) -> str:
    return str(image_error_from_os_error(error) if isinstance(error, OSError) else error)


def _failure_summary(failures: Sequence[str], images: int) -> str:
    more = len(failures) - _FAILURES_SHOWN
    shown = [*failures[:_FAILURES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n  ".join([f"{len(failures)} of {counted(images, 'image')} failed:", *shown])

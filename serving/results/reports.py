"""What `predict` and `client` leave behind: pictures, COCO results and arrays."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import click
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track

from ...model.images import IMAGE_SUFFIXES, ImageError, decode_image
from ..config import ReportFormat
from ..detections import Detections
from ..errors import ClientError, image_error_from_os_error
from .coco_json import coco_results, image_id_from_path
from .drawing import draw_detections
from .numpy_arrays import arrays_from_detections

RESULTS_NAME = "detections.json"

_FAILURES_SHOWN = 3
"""At the end; each is shown when it comes."""


def image_files(sources: Sequence[Path]) -> list[Path]:
    """The images among files and folders; of a folder those whose names end as images' do.

    Raises:
        click.UsageError: there are none, or two that would be the same image in the results.
    """
    files: dict[int | str, Path] = {}
    for source in sources:
        found = [source]
        if source.is_dir():
            found = sorted(p for p in source.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
        for path in found:
            image_id = image_id_from_path(path)
            other = files.setdefault(image_id, path)
            if other != path:
                raise click.UsageError(
                    f"{other} and {path} would both be image {image_id} in the results; "
                    "give one at a time"
                )
    if not files:
        raise click.UsageError(
            f"{', '.join(map(str, sources))} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})"
        )
    return list(files.values())


def check_folder(folder: Path, files: Sequence[Path], formats: Collection[ReportFormat]) -> None:
    """Refuse to write pictures where another run would take them for images.

    Raises:
        click.UsageError: there are to be pictures, and images or what they link to lie there.
    """
    if "pictures" not in formats:
        return
    places = {os.path.realpath(path.parent) for path in files}
    places |= {os.path.dirname(os.path.realpath(path)) for path in files}
    if os.path.realpath(folder) in places:
        raise click.UsageError(
            f"{folder} holds images that were given, and pictures are written only to another "
            "folder than theirs; choose another --output"
        )


def write_report(
    files: Sequence[Path],
    outcomes: Iterable[Detections | ImageError | ClientError | OSError],
    folder: Path,
    formats: Collection[ReportFormat] = ("pictures", "coco"),
) -> None:
    """Write each image's detections as they come; in the main thread.

    Whatever ends it before the last, SIGTERM and SIGHUP among it, the COCO results of those that
    came are written. If none came, those of an earlier run stay.

    Args:
        files: The images.
        outcomes: In the same order, their detections or why there are none.
        folder: Where to write; made if missing.
        formats: `pictures`, a PNG of each image with its detections; `coco`, all of them as COCO
            results; `numpy`, an NPZ of each image with `numpy_arrays.arrays_from_detections`.

    Raises:
        click.ClickException: some images failed, all others are written.
        OSError: a file could not be written; it is named, and those before it are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report, failures = _Report(folder, formats), []
    console = Console(stderr=True, markup=False, emoji=False)
    pairs = zip(files, outcomes, strict=True)
    with _ended_by_signals() as ignore_signals:
        try:
            for path, outcome in track(pairs, "Detecting", len(files), console=console):
                failure = report.add(path, outcome)
                if failure:
                    failures.append(f"{path}: {failure}")
                    console.print(failures[-1], style="red", soft_wrap=True)
        finally:
            try:
                ignore_signals()
            finally:  # one may come at that moment
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
            file = BytesIO()
            np.savez_compressed(file, **arrays)
            _write(self._folder / f"{path.stem}.npz", file.getvalue())
        if "pictures" in self._formats:
            try:
                picture = _drawn(path, outcome)
            except (OSError, ImageError) as error:  # it was replaced or went in the meantime
                return f"its picture is not drawn: {_sentence_from_failure(error)}"
            _write(self._folder / f"{path.stem}.png", picture)
        return ""

    def finish(self) -> None:
        """Write the COCO results and say how much it is, if there was an answer at all."""
        if not self._images:
            return
        if "coco" in self._formats:
            _write(self._folder / RESULTS_NAME, json.dumps(self._results).encode())
        click.echo(f"{self._detections} detections in {self._images} images, see {self._folder}")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Let SIGTERM and SIGHUP end what is within as Ctrl+C does, with a status of their own.

    Those that are ignored, as under `nohup`, or handled already stay so. Once one has ended it,
    both are ignored as long as the process lasts.

    Yields:
        A function after which they are ignored.
    """
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]

    def handle_with(handler: Any) -> None:
        for number in numbers:
            signal.signal(number, handler)

    is_ending = False

    def end(number: int, _: object) -> NoReturn:
        nonlocal is_ending
        is_ending = True
        handle_with(signal.SIG_IGN)  # `timeout` and shells send theirs twice
        sys.exit(128 + number)

    handle_with(end)
    try:
        yield partial(handle_with, signal.SIG_IGN)
    finally:
        if not is_ending:
            handle_with(signal.SIG_DFL)


def _write(path: Path, data: bytes) -> None:
    """Put a whole file in place of what was there, or leave that.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = path.with_name(f".{uuid4().hex}.partial")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        remedy = "make room or choose another folder with --output"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _sentence_from_failure(error: Exception) -> str:
    return str(image_error_from_os_error(error) if isinstance(error, OSError) else error)


def _sentences_from_failures(failures: Sequence[str], images: int) -> str:
    more = len(failures) - _FAILURES_SHOWN
    shown = [*failures[:_FAILURES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n  ".join([f"{len(failures)} of {images} images failed:", *shown])


def _drawn(path: Path, detections: Detections) -> bytes:
    """A PNG of an image and what was found in it."""
    image = decode_image(path.read_bytes(), max_pixels=detections.height * detections.width)
    file = BytesIO()
    Image.fromarray(draw_detections(image, detections)).save(file, "PNG")
    return file.getvalue()

"""The verbs `client` and `predict`: detection in files and folders."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from ..model.manifest import Precision
from .config import BackendName, ServeConfig
from .connection import MAX_RETRIES, Credentials
from .detections import DetectionOptions
from .reports import ReportFormat, image_files, write_report

_Command = Callable[..., None]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_REPORT_OPTIONS = (
    click.argument("images", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)),
    click.option(
        "-o", "--output", type=click.Path(file_okay=False, path_type=Path), default="detections",
        show_default=True, help="Folder for what is found.",
    ),
    click.option(
        "--format", "formats", multiple=True, type=click.Choice(get_args(ReportFormat)),
        default=("pictures", "coco"), show_default=True,
        help="What to write, once for each: pictures, a PNG of each image with its detections "
        "drawn; coco, all in detections.json; numpy, an NPZ of each image's arrays.",
    ),
    click.option(
        "--score-threshold", type=click.FloatRange(0, 1), default=0.5, show_default=True,
        help="Leave out detections that score no higher.",
    ),
)  # fmt: skip
_CONNECTION_OPTIONS = (
    click.option(
        "--concurrency", type=click.IntRange(min=1), default=8, show_default=True,
        help="Requests in flight.",
    ),
    click.option(
        "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=30.0,
        show_default=True, help="Seconds to wait for an answer, over all tries.",
    ),
    click.option(
        "--retries", type=click.IntRange(0, MAX_RETRIES), default=MAX_RETRIES, show_default=True,
        help="Times to ask again, after a growing pause, a server that is too busy or away.",
    ),
    click.option("--tls", is_flag=True, help="Encrypt; the options below do so, too."),
    click.option(
        "--root-certificate", type=_FILE,
        help="PEM of the authority that signed the server's certificate, if it is no public one.",
    ),
    click.option("--certificate", type=_FILE, help="PEM of the client's own certificate."),
    click.option("--key", type=_FILE, help="PEM of the key of --certificate."),
    click.option("--token-file", type=_FILE, help="Holds the token that the server asks for."),
)  # fmt: skip


def _options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command()
@click.argument("host")
@_options(*_REPORT_OPTIONS, *_CONNECTION_OPTIONS)
def client(
    host: str,
    images: Sequence[Path],
    output: Path,
    formats: Sequence[ReportFormat],
    score_threshold: float,
    concurrency: int,
    timeout_s: float,
    retries: int,
    **security: Any,
) -> None:
    """Ask the server at HOST, such as localhost:8500, for the objects in IMAGES.

    IMAGES are files and folders.
    """
    from .client import DetectorClient

    files = image_files(images)
    options = DetectionOptions(score_threshold=score_threshold)
    credentials = _credentials(**security)
    with DetectorClient(
        host, timeout_s=timeout_s, retries=retries, credentials=credentials
    ) as detector:
        outcomes = detector.detect_many(files, options, concurrency=concurrency)
        write_report(files, outcomes, output, formats)


def _credentials(
    *,
    tls: bool,
    root_certificate: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> Credentials | None:
    """What the options say to show the server; None without TLS."""
    files = (root_certificate, certificate, key)
    if not (tls or token_file or any(files)):
        return None
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key go together; give both or none")
    root, own, private = (None if path is None else path.read_bytes() for path in files)
    token = None if token_file is None else token_file.read_text().strip()
    return Credentials(root_certificate=root, certificate=own, key=private, token=token)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@_options(*_REPORT_OPTIONS)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    help="The default is the backend's first in the bundle.",
)
@click.option(
    "--backend",
    type=click.Choice(get_args(BackendName)),
    default="auto",
    show_default=True,
    help=ServeConfig.model_fields["backend"].description,
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=ServeConfig().max_batch,
    show_default=True,
    help="Images that a GPU computes at once.",
)
def predict(
    bundle: Path,
    images: Sequence[Path],
    output: Path,
    formats: Sequence[ReportFormat],
    score_threshold: float,
    precision: Precision | None,
    backend: BackendName,
    max_batch: int,
) -> None:
    """Detect objects in IMAGES with BUNDLE, without a server.

    IMAGES are files and folders.
    """
    from .detections import DetectionOptions
    from .predictor import Predictor
    from .reports import image_files, write_report

    files = image_files(images)
    options = DetectionOptions(score_threshold=score_threshold)
    with contextlib.closing(Predictor(bundle, precision, backend, max_batch)) as predictor:
        contents = (path.read_bytes() for path in files)
        write_report(files, predictor.detect_many(contents, options), output, formats)

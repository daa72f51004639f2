"""The verbs `client` and `predict`: detection in files and folders."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from ..model.manifest import Precision
from ..model.option_types import FiniteRange
from .addresses import check_address
from .config import DAY_S, MAX_RETRIES, BackendName, ReportFormat, ServeConfig

if TYPE_CHECKING:
    from .client.connection import Credentials
    from .detections import DetectionOptions

_Command = Callable[..., None]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SOURCE = click.Path(exists=True, path_type=Path)


class _SourceType(click.ParamType[Path | str]):
    """A path that exists, or an address as `s3://bucket/folder`."""

    name = "path"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        return str(value) if _is_address(value) else Path(_SOURCE.convert(value, param, ctx))


def _is_address(place: object) -> bool:
    return "://" in str(place)


_SECONDS = FiniteRange(min=0, min_open=True, max=DAY_S)

_REPORT_OPTIONS = (
    click.option(
        "-o", "--output", type=click.Path(file_okay=False), default="detections",
        show_default=True,
        help="Folder for what is found; for pictures, another than that of the images.",
    ),
    click.option(
        "--format", "formats", multiple=True, type=click.Choice(get_args(ReportFormat)),
        default=("pictures", "coco"), show_default=True,
        help="What to write, once for each: pictures, a PNG of each image with its detections "
        "drawn; coco, all in detections.json; numpy, an NPZ of each image's arrays.",
    ),
    click.option(
        "--score-threshold", type=FiniteRange(0, 1), default=0.5, show_default=True,
        help="Leave out detections that score no higher.",
    ),
)  # fmt: skip
_TERMS_OPTIONS = (
    click.option(
        "--precision", type=click.Choice(get_args(Precision)),
        help="One that the server computes in; its first is the default.",
    ),
    click.option(
        "--priority", type=click.IntRange(1, 3), default=2, show_default=True,
        help="How urgent it is; 1 goes first.",
    ),
    click.option(
        "--server-timeout", "server_timeout_s", type=_SECONDS,
        help="Seconds after which the server gives an image up; it may have a limit of its own.",
    ),
)  # fmt: skip
_CONNECTION_OPTIONS = (
    click.option(
        "--concurrency", type=click.IntRange(min=1), default=8, show_default=True,
        help="Requests in flight.",
    ),
    click.option(
        "--timeout", "timeout_s", type=_SECONDS, default=30.0, show_default=True,
        help="Seconds to wait for an answer, over all tries.",
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
    click.option(
        "--token-file", type=_FILE,
        help="Holds the token that the server asks for; # begins a comment.",
    ),
)  # fmt: skip


def _options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _checked_address(_: click.Context, __: click.Parameter, value: str) -> str:
    try:
        check_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command()
@click.argument("host", callback=_checked_address)
@click.argument("images", nargs=-1, required=True, type=_SOURCE)
@_options(*_REPORT_OPTIONS, *_TERMS_OPTIONS, *_CONNECTION_OPTIONS)
def client(
    host: str,
    images: Sequence[Path],
    output: str,
    formats: Sequence[ReportFormat],
    score_threshold: float,
    precision: Precision | None,
    priority: int,
    server_timeout_s: float | None,
    concurrency: int,
    timeout_s: float,
    retries: int,
    **security: Any,
) -> None:
    """Ask the server at HOST, such as localhost:8500, for the objects in IMAGES.

    IMAGES are files and folders.
    """
    from .client import DetectorClient
    from .detections import DetectionOptions
    from .results.reports import write_report
    from .scheduling import RequestTerms

    files, folder = _files_and_folder(images, output, formats)
    options = DetectionOptions(score_threshold=score_threshold)
    terms = RequestTerms(precision=precision, priority=priority, timeout_s=server_timeout_s)
    credentials = _credentials(**security)
    with DetectorClient(
        host, timeout_s=timeout_s, retries=retries, credentials=credentials
    ) as detector:
        outcomes = detector.detect_many(files, options, terms, concurrency=concurrency)
        write_report(files, outcomes, folder, formats)


def _files_and_folder(
    images: Sequence[Path | str], output: str, formats: Sequence[ReportFormat]
) -> tuple[list[Path], Path]:
    """What to detect in and where to write, checked before anything is loaded or asked.

    Raises:
        click.UsageError: one of them is an address, there are no images, or what would be written
            collides with them or with each other.
    """
    from .results.reports import check_folder, image_files

    for image in images:
        if _is_address(image):
            raise click.UsageError(f"{image} is an address, which is read only with --ray")
    if _is_address(output):
        raise click.UsageError(
            f"{output} is an address, which is written to only by predict with --ray; "
            "choose a folder with --output"
        )
    files, folder = image_files([Path(image) for image in images]), Path(output)
    check_folder(folder, files, formats)
    return files, folder


def _credentials(
    *,
    tls: bool,
    root_certificate: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> "Credentials | None":
    """What the options say to show the server; None without TLS."""
    from .client.connection import Credentials

    files = (root_certificate, certificate, key)
    if not (tls or token_file or any(files)):
        return None
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key go together; give both or none")
    root, own, private = (None if path is None else path.read_bytes() for path in files)
    token = None if token_file is None else _token_in(token_file)
    return Credentials(root_certificate=root, certificate=own, key=private, token=token)


def _token_in(path: Path) -> str:
    from .errors import ServingError
    from .transport.access import tokens_in

    try:
        tokens = tokens_in(path)
    except ServingError as error:
        raise click.UsageError(str(error)) from None
    if len(tokens) > 1:
        raise click.UsageError(f"{path} holds {len(tokens)} tokens; leave only your own in it")
    return tokens[0]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=_SourceType())
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
@click.option(
    "--ray",
    "with_ray",
    is_flag=True,
    help="Spread the work over this machine or the cluster of RAY_ADDRESS. IMAGES and --output may "
    "be addresses, such as s3://bucket/folder; folders are taken with those in them, and what is "
    "found becomes Parquet files.",
)
def predict(
    bundle: Path,
    images: Sequence[Path | str],
    output: str,
    formats: Sequence[ReportFormat],
    score_threshold: float,
    precision: Precision | None,
    backend: BackendName,
    max_batch: int,
    with_ray: bool,
) -> None:
    """Detect objects in IMAGES with BUNDLE, without a server.

    IMAGES are files and folders.
    """
    from .detections import DetectionOptions

    options = DetectionOptions(score_threshold=score_threshold)
    if with_ray:
        _predict_with_ray(
            bundle, images, output, options,
            precision=precision, backend=backend, max_batch=max_batch,
        )  # fmt: skip
        return
    from .offline.predictor import Predictor
    from .results.reports import write_report

    files, folder = _files_and_folder(images, output, formats)
    with (
        contextlib.closing(Predictor(bundle, precision, backend, max_batch)) as predictor,
        contextlib.closing(predictor.detect_many(files, options)) as outcomes,
    ):
        write_report(files, outcomes, folder, formats)


def _predict_with_ray(
    bundle: Path,
    images: Sequence[Path | str],
    output: str,
    options: "DetectionOptions",
    **model: Any,
) -> None:
    """Detect in images by way of Ray, and say what came of it.

    Raises:
        click.UsageError: a format was asked for.
        click.ClickException: some images failed, all others are written.
    """
    source = click.get_current_context().get_parameter_source("formats")
    if source is ParameterSource.COMMANDLINE:
        raise click.UsageError("--format is of no use with --ray, which writes Parquet files")
    from .offline.ray_prediction import predict_with_ray

    target = output if _is_address(output) else str(Path(output).absolute())
    sources = [i if isinstance(i, str) else str(i.absolute()) for i in images]
    summary = predict_with_ray(bundle, sources, target, options, **model)
    click.echo(f"detections in {summary.images - summary.failures} images, see {output}")
    if summary.failures:
        raise click.ClickException(
            f"{summary.failures} of {summary.images} images failed; their rows say why"
        )

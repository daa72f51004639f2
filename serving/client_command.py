"""The verb `client`: detection by asking a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ..model.manifest import Precision
from ..model.option_types import FiniteRange
from .addresses import check_address
from .config import DAY_S, MAX_RETRIES, ReportFormat
from .report_options import REPORT_OPTIONS, SOURCE, files_and_folder, options_of

if TYPE_CHECKING:
    from .client import Credentials

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SECONDS = FiniteRange(min=0, min_open=True, max=DAY_S)
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
    click.option(
        "--tls/--no-tls", default=None,
        help="Encrypt, as the options below do unasked. --no-tls sends a token as it is, for where "
        "something else encrypts, as the sidecar of a service mesh.",
    ),
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


def _checked_address(_: click.Context, __: click.Parameter, value: str) -> str:
    try:
        check_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command()
@click.argument("host", callback=_checked_address)
@click.argument("images", nargs=-1, required=True, type=SOURCE)
@options_of(*REPORT_OPTIONS, *_TERMS_OPTIONS, *_CONNECTION_OPTIONS)
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

    files, folder = files_and_folder(images, output, formats)
    options = DetectionOptions(score_threshold=score_threshold)
    terms = RequestTerms(precision=precision, priority=priority, timeout_s=server_timeout_s)
    credentials = _credentials(**security)
    with DetectorClient(
        host, timeout_s=timeout_s, retries=retries, credentials=credentials
    ) as detector:
        outcomes = detector.detect_many(files, options, terms, concurrency=concurrency)
        write_report(files, outcomes, folder, formats)


def _credentials(
    *,
    tls: bool | None,
    root_certificate: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> "Credentials":
    """What the options say to show the server."""
    from .client import Credentials

    files = (root_certificate, certificate, key)
    encrypts = bool(token_file or any(files)) if tls is None else tls
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key go together; give both or none")
    if any(files) and not encrypts:
        raise click.UsageError("certificates are for TLS; leave them or --no-tls out")
    root, own, private = (None if path is None else path.read_bytes() for path in files)
    token = None if token_file is None else _token_in(token_file)
    return Credentials(
        root_certificate=root, certificate=own, key=private, token=token, tls=encrypts
    )


def _token_in(path: Path) -> str:
    from .errors import ServingError
    from .tokens import tokens_in

    try:
        tokens = tokens_in(path)
    except ServingError as error:
        raise click.UsageError(str(error)) from None
    if len(tokens) > 1:
        raise click.UsageError(f"{path} holds {len(tokens)} tokens; leave only your own in it")
    return tokens[0]

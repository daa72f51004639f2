"""Command `client`: detection by a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ...model.bundle.manifest import Precision
from ...model.config.option_types import FiniteRange
from ..config import DAY_S, MAX_RETRIES, ReportFormat, check_address
from .report_options import REPORT_OPTIONS, SOURCE, files_and_folder, options_of

if TYPE_CHECKING:
    from ..client import Credentials

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SECONDS = FiniteRange(min=0, min_open=True, max=DAY_S)
_SCHEDULING_OPTIONS = (
    click.option(
        "--precision", type=click.Choice(get_args(Precision)),
        help="Precision of inference, one of those that the server serves. Default: its first one.",
    ),
    click.option(
        "--priority", type=click.IntRange(1, 3), default=2, show_default=True,
        help="Priority in the server's queue; 1 is the most urgent.",
    ),
    click.option(
        "--server-timeout", "server_timeout_s", type=_SECONDS,
        help="Time limit of a request in the server, in seconds. The server's own may be lower.",
    ),
)  # fmt: skip
_CONNECTION_OPTIONS = (
    click.option(
        "--concurrency", type=click.IntRange(min=1), default=8, show_default=True,
        help="Maximum number of requests in flight.",
    ),
    click.option(
        "--timeout", "timeout_s", type=_SECONDS, default=30.0, show_default=True,
        help="Deadline of a request in the client in seconds, all retries included.",
    ),
    click.option(
        "--retries", type=click.IntRange(0, MAX_RETRIES), default=MAX_RETRIES, show_default=True,
        help="Maximum number of retries, with growing pauses, if the server is overloaded or "
        "unreachable.",
    ),
    click.option(
        "--tls/--no-tls", default=None,
        help="Use TLS. The options below imply --tls. With --no-tls the token is sent in plain "
        "text; use it if something else encrypts the connection, such as a service mesh.",
    ),
    click.option(
        "--root-certificate", type=_FILE,
        help="PEM of the CA that signed the server's certificate. Not needed for public CAs.",
    ),
    click.option("--certificate", type=_FILE, help="PEM of the client certificate."),
    click.option("--key", type=_FILE, help="PEM of the private key of --certificate."),
    click.option(
        "--token-file", type=_FILE,
        help="File with the bearer token for the server; # begins a comment.",
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
@options_of(*REPORT_OPTIONS, *_SCHEDULING_OPTIONS, *_CONNECTION_OPTIONS)
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
    """Detect objects in IMAGES by the server at HOST, such as localhost:8500.

    IMAGES are files and folders.
    """
    from ..client import DetectorClient
    from ..detections import DetectionOptions
    from ..request_options import SchedulingOptions
    from ..results.reports import write_report

    files, folder = files_and_folder(images, output, formats)
    options = DetectionOptions(score_threshold=score_threshold)
    scheduling = SchedulingOptions(
        precision=precision, priority=priority, timeout_s=server_timeout_s
    )
    credentials = _credentials(**security)
    with DetectorClient(
        host, timeout_s=timeout_s, retries=retries, credentials=credentials
    ) as connection:
        outcomes = connection.detect_many(files, options, scheduling, concurrency=concurrency)
        write_report(files, outcomes, folder, formats)


def _credentials(
    *,
    tls: bool | None,
    root_certificate: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> "Credentials":
    """Return the credentials that the command's options describe."""
    from ..client import Credentials

    files = (root_certificate, certificate, key)
    # Credentials imply TLS unless --no-tls is given.
    uses_tls = bool(token_file or any(files)) if tls is None else tls
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key go together; give both or none")
    if any(files) and not uses_tls:
        raise click.UsageError("certificates require TLS; omit the certificates or --no-tls")
    root, own, private = (None if path is None else path.read_bytes() for path in files)
    token = None if token_file is None else _read_token(token_file)
    return Credentials(
        root_certificate=root, certificate=own, key=private, token=token, tls=uses_tls
    )


def _read_token(path: Path) -> str:
    from ..credential_files import read_tokens
    from ..errors import ServingError

    try:
        tokens = read_tokens(path)
    except ServingError as error:
        raise click.UsageError(str(error)) from None
    if len(tokens) > 1:
        raise click.UsageError(f"{path} holds {len(tokens)} tokens; keep only your own in the file")
    return tokens[0]

"""Command `client`: detection by a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from ...model.bundle.manifest import Precision
from ...model.config.option_types import FiniteRange
from ..config import DAY_S, MAX_RETRIES, ReportFormat
from .connection_options import CREDENTIAL_OPTIONS, checked_address, credentials_from_options
from .report_options import REPORT_OPTIONS, SOURCE, files_and_folder, options_of

_SECONDS = FiniteRange(min=0, min_open=True, max=DAY_S)
_SCHEDULING_OPTIONS = (
    click.option("--model", default="", help="Name of the model. Default: the server's first one."),
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
        help="Time limit of a request in the server, in seconds. The server's limit may be lower.",
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
)  # fmt: skip


@click.command()
@click.argument("host", callback=checked_address)
@click.argument("images", nargs=-1, required=True, type=SOURCE)
@options_of(*REPORT_OPTIONS, *_SCHEDULING_OPTIONS, *_CONNECTION_OPTIONS, *CREDENTIAL_OPTIONS)
def client(
    host: str,
    images: Sequence[Path],
    output: str,
    formats: Sequence[ReportFormat],
    score_threshold: float,
    model: str,
    precision: Precision | None,
    priority: int,
    server_timeout_s: float | None,
    concurrency: int,
    timeout_s: float,
    retries: int,
    **security: Any,
) -> None:
    """Detect objects in IMAGES by the server at HOST, such as localhost:8500.

    IMAGES are files and folders, without subfolders.
    """
    from ..client import DetectorClient
    from ..detections import DetectionOptions, SchedulingOptions
    from .reports import write_report

    files, folder = files_and_folder(images, output, formats)
    options = DetectionOptions(score_threshold=score_threshold)
    scheduling = SchedulingOptions(
        model=model, precision=precision, priority=priority, timeout_s=server_timeout_s
    )
    credentials = credentials_from_options(**security)
    with DetectorClient(
        host, timeout_s=timeout_s, retries=retries, credentials=credentials
    ) as connection:
        outcomes = connection.detect_many(files, options, scheduling, concurrency=concurrency)
        write_report(files, outcomes, folder, formats)

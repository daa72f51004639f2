"""Commands `client` (detect objects with a server) and `health` (check a server's state)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from ...model.bundle.manifest import Precision
from ...model.config.option_types import FiniteRange
from ..config import DAY_S, MAX_RETRIES, ReportFormat
from .options import (
    CREDENTIAL_OPTIONS,
    REPORT_OPTIONS,
    SOURCE,
    checked_address,
    credentials_from_options,
    files_and_folder,
    options_of,
    silence_grpc,
)

_SECONDS = FiniteRange(min=0, min_open=True, max=DAY_S)
_SCHEDULING_OPTIONS = (
    click.option("--model", default="", help="Name of the model. Default: the server's first one."),
    click.option(
        "--precision", type=click.Choice(get_args(Precision)),
        help="Precision of inference; the server must serve it. Default: the server's first one.",
    ),
    click.option(
        "--priority", type=click.IntRange(1, 3), default=2, show_default=True,
        help="Priority in the server's queue; 1 is the most urgent.",
    ),
    click.option(
        "--server-timeout", "server_timeout_s", type=_SECONDS,
        help="Time limit of a request in the server, in seconds. If the server's own limit is "
        "lower, that limit applies.",
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
    """Detect objects in IMAGES with the server at HOST, such as localhost:8500.

    IMAGES are image files, and folders of image files. Images in subfolders are ignored.
    """
    silence_grpc()
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


@click.command()
@click.argument("host", default="localhost:8500", callback=checked_address)
@click.option(
    "--service",
    default="",
    help="Service or model to check. 'liveness' checks only that the process responds. Default: "
    "the server and its first model.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=_SECONDS,
    default=5.0,
    show_default=True,
    help="Time limit in seconds.",
)
@options_of(*CREDENTIAL_OPTIONS)
def health(host: str, service: str, timeout_s: float, **security: Any) -> None:
    """Exit with 0 if the server at HOST can process requests, and with 1 otherwise.

    HOST is localhost:8500 by default. The server itself needs no token for this check, but a proxy
    in front of it may need one.
    """
    silence_grpc()
    import grpc
    from grpc_health.v1 import health_pb2 as pb
    from grpc_health.v1.health import SERVICE_NAME
    from grpc_health.v1.health_pb2_grpc import HealthStub

    from ..client.connection import error_from_rpc
    from ..errors import ServingError

    credentials = credentials_from_options(**security)
    with credentials.open_channel(grpc, host) as channel:
        request = pb.HealthCheckRequest(service=service)
        try:
            check = HealthStub(channel).Check
            response = check(request, timeout=timeout_s, metadata=credentials.metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, host, timeout_s, SERVICE_NAME) from error
    state = pb.HealthCheckResponse.ServingStatus.Name(response.status)
    if response.status != pb.HealthCheckResponse.SERVING:
        raise ServingError(
            f"the server at {host} reports {state}, because its model is loading or unloaded, no "
            "worker process is up, or the server is stopping; check again later"
        )
    click.echo(state)

"""Command `health`: state of a server, for health checks of containers."""

from typing import Any

import click

from ...model.config.option_types import FiniteRange
from ..config import DAY_S
from .connection_options import TLS_OPTIONS, checked_address, credentials_from_options
from .report_options import options_of


@click.command()
@click.argument("host", default="localhost:8500", callback=checked_address)
@click.option(
    "--service",
    default="",
    help="Service or model to check. 'liveness' checks only that the process responds. Default: "
    "the server with its model.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0, min_open=True, max=DAY_S),
    default=5.0,
    show_default=True,
    help="Time limit in seconds.",
)
@options_of(*TLS_OPTIONS)
def health(host: str, service: str, timeout_s: float, **security: Any) -> None:
    """Exit with 0 if the server at HOST can process requests, and with 1 otherwise.

    HOST is localhost:8500 by default.
    """
    import grpc
    from grpc_health.v1 import health_pb2 as pb
    from grpc_health.v1.health_pb2_grpc import HealthStub

    from ..client.call_errors import error_from_rpc
    from ..errors import ServingError

    credentials = credentials_from_options(**security)
    with (
        grpc.secure_channel(host, credentials.channel_credentials())
        if credentials.tls
        else grpc.insecure_channel(host)
    ) as channel:
        request = pb.HealthCheckRequest(service=service)
        try:
            response = HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, host, timeout_s) from error
    state = pb.HealthCheckResponse.ServingStatus.Name(response.status)
    if response.status != pb.HealthCheckResponse.SERVING:
        raise ServingError(
            f"the server at {host} reports {state}, because it is loading its model, has unloaded "
            "its model, or is stopping; check again later"
        )
    click.echo(state)

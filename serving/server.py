"""The server: from a bundle to a listening port, and a clean stop."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from ..model.manifest import read_manifest
from ..protos.maskrcnn.v1 import detector_pb2 as pb
from ..protos.maskrcnn.v1.detector_pb2_grpc import add_DetectorServicer_to_server
from .backends.loading import load_backend, served_precision
from .config import ServeConfig
from .errors import ServingError
from .health import HealthService
from .messages import model_response
from .pipeline import Pipeline
from .service import DetectorService

_LAST_CALLS_S = 0.25
"""For calls that have arrived but wait in gRPC, which would cancel them, to be taken up."""

_SERVICE = pb.DESCRIPTOR.services_by_name["Detector"].full_name


async def serve(bundle: Path, config: ServeConfig, on_ready: Callable[[str], None]) -> None:
    """Serve a bundle until SIGTERM or SIGINT.

    Args:
        bundle: Folder that export wrote.
        config: How to serve it.
        on_ready: Called with the address when the server is ready.

    Raises:
        BundleError: the bundle is missing, damaged or lacks the precision.
        BackendError: the backend does not run here, or not with such batches.
        ServingError: the address cannot be listened on.
    """
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    async with detection_server(bundle, config) as address:
        on_ready(address)
        await stop.wait()
        for number in signals:  # a second signal ends the process at once
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def detection_server(bundle: Path, config: ServeConfig) -> AsyncIterator[str]:
    """Serve a bundle within the context, and finish the requests in progress at its end.

    Health says NOT_SERVING until the model is warm, and again from the end of the context on.

    Yields:
        The address, `host:port`, of a server that is ready.

    Raises:
        BundleError: the bundle is missing, damaged or lacks the precision.
        BackendError: the backend does not run here, or not with such batches.
        ServingError: the address cannot be listened on.
    """
    manifest = read_manifest(bundle)
    precision = config.precision or served_precision(manifest, config.backend)
    backend = load_backend(bundle, manifest, precision, config.backend, config.max_batch)
    with contextlib.closing(Pipeline(manifest, backend, config)) as pipeline:
        server, port = _listening_server(config)
        model = model_response(manifest, backend.buckets, precision, config)
        service = DetectorService(pipeline, model, precision, 2 * config.max_batch)
        add_DetectorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health = HealthService(_SERVICE)
        add_HealthServicer_to_server(health, server)
        await server.start()
        try:
            # Before the group, which would wrap what is raised.
            await pipeline.warm_up()
            async with asyncio.TaskGroup() as tasks:
                computing = tasks.create_task(pipeline.run())
                health.set_ready()
                try:
                    yield f"{config.host}:{port}"
                finally:
                    health.stop()
                    await asyncio.sleep(_LAST_CALLS_S)
                    service.stop_reading()
                    await server.stop(config.stop_grace_s)
                    computing.cancel()
        finally:
            await server.stop(None)


def _listening_server(config: ServeConfig) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", config.max_message_mb << 20),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # otherwise two servers could share a port unnoticed
        ]
    )
    try:
        return server, server.add_insecure_port(f"{config.host}:{config.port}")
    except RuntimeError:
        raise ServingError(
            f"cannot listen on {config.host}:{config.port}; "
            "choose an address of this machine and a free port, or port 0"
        ) from None

"""The server: from a bundle to a listening port, a new bundle in its place, and a clean stop."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from ..model.manifest import BundleError
from ..protos.inference import open_inference_pb2
from ..protos.inference.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from ..protos.maskrcnn.v1 import detector_pb2
from ..protos.maskrcnn.v1.detector_pb2_grpc import add_DetectorServicer_to_server
from .config import ServeConfig, address_of
from .detector_service import DetectorService
from .errors import ServingError
from .garbage_collection import pass_over_present_objects
from .monitoring.loop_lag import LoopLag
from .monitoring.prometheus import add_server_metrics, metrics_server
from .monitoring.telemetry import Telemetry
from .monitoring.tracing import load_tracer
from .open_inference.service import InferenceService
from .pipeline import Pipeline
from .transport.access import AccessPolicy
from .transport.certificates import server_credentials
from .transport.health import HealthService
from .transport.listening import listening_server
from .transport.receiving import Reception
from .transport.reflection import add_reflection

_log = logging.getLogger(__name__)

_SERVICES = (
    detector_pb2.DESCRIPTOR.services_by_name["Detector"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
)


async def serve(bundle: Path, config: ServeConfig, on_ready: Callable[[str], None]) -> None:
    """Serve a bundle until SIGTERM or SIGINT; on SIGHUP load what then lies at its path.

    Args:
        bundle: Folder that export wrote.
        config: How to serve it.
        on_ready: Called with the address when the server is ready.

    Raises:
        BundleError: the bundle is missing, damaged or lacks the precision.
        BackendError: the backend does not run here, or not with such batches.
        ServingError: the address cannot be listened on, or certificates, keys or tokens not used.
    """
    stop, reload = asyncio.Event(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    is_ready = False

    def ask_to_stop() -> None:
        stop.set()
        if task and not is_ready:  # which may take minutes
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, ask_to_stop)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    try:
        async with detection_server(bundle, config, reload) as address:
            is_ready = True
            pass_over_present_objects()
            on_ready(address)
            await stop.wait()
            for number in signals:  # a second signal ends the process at once
                loop.remove_signal_handler(number)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


@contextlib.asynccontextmanager
async def detection_server(
    bundle: Path, config: ServeConfig, reload: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """Serve a bundle within the context, and finish the requests in progress at its end.

    Health says NOT_SERVING until the model is warm, again from the end of the context on, and
    while the model is unloaded or the default precision's backend is broken.

    Args:
        bundle: Folder that export wrote.
        config: How to serve it.
        reload: When it is set, what then lies at the bundle's path takes its place, if it is good.

    Yields:
        The address, `host:port`, of a server that is ready.

    Raises:
        BundleError: the bundle is missing, damaged or lacks the precision.
        BackendError: the backend does not run here, or not with such batches.
        ServingError: the address cannot be listened on, or certificates, keys or tokens not used.
    """
    # Before the model, which takes a while.
    access, credentials = AccessPolicy(config), server_credentials(config)
    telemetry, lag = Telemetry(load_tracer(config.tracing)), LoopLag()
    with (
        contextlib.closing(telemetry.tracer),
        contextlib.closing(Pipeline(bundle, config, telemetry)) as pipeline,
        _metrics_server(pipeline, lag, config),
    ):
        await pipeline.model.load()
        reception = Reception(access, config, pipeline)
        server, port = listening_server(config, credentials, telemetry.tracer, reception)
        service = DetectorService(pipeline, config)
        add_DetectorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        names = [service.full_name for service in _SERVICES]
        health = HealthService(*names, models=lambda: pipeline.model.states)
        add_HealthServicer_to_server(health, server)
        inference = InferenceService(pipeline, config, health)
        add_GRPCInferenceServiceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
        add_reflection((*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"]), server)
        await server.start()
        try:
            # Before the groups, which would wrap what is raised.
            await pipeline.model.warm_up()
            async with (
                pipeline.running(),
                _background(_reload(pipeline, reload or asyncio.Event()), health.run(), lag.run()),
            ):
                health.set_ready()
                address = address_of(config.host, port)
                _log.info("ready at %s", address)
                try:
                    yield address
                finally:
                    health.stop()
                    await asyncio.sleep(config.drain_delay_s)
                    service.stop_reading()
                    inference.stop_reading()
                    reception.stop()
                    await server.stop(config.stop_grace_s)
        finally:
            await server.stop(None)


@contextlib.contextmanager
def _metrics_server(pipeline: Pipeline, lag: LoopLag, config: ServeConfig) -> Iterator[None]:
    """Publish metrics within the context, if that is asked for."""
    if config.metrics_port is None:
        yield
        return
    registry = pipeline.telemetry.metrics.registry
    add_server_metrics(registry, pipeline, lag)
    with metrics_server(registry, config.host, config.metrics_port) as url:
        _log.info("metrics at %s", url)
        yield


@contextlib.asynccontextmanager
async def _background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do within the context what no request asks for."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _reload(pipeline: Pipeline, asked: asyncio.Event) -> None:
    """Reload the bundle whenever asked to; if that fails, what was served before is."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            await pipeline.reload()
        except (BundleError, ServingError):
            pass  # which the pipeline has logged
        except Exception:
            _log.exception("the bundle could not be reloaded")

"""The server: load bundles, listen on its ports, reload on SIGHUP, drain on SIGTERM."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from ..protos.inference import open_inference_pb2
from ..protos.inference.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from ..protos.maskrcnn.v1 import detector_pb2
from .config import ServeConfig, address_of
from .engines.worker_main import freeze_garbage_collector
from .errors import ServingError
from .grpc_status import wait_for_stop
from .host import in_daemon_thread, notify_service_manager
from .monitoring.machine_metrics import CpuCollector, LoopLag
from .monitoring.metrics import Metrics
from .monitoring.telemetry import Telemetry, load_tracer
from .open_inference.service import InferenceService, UnsupportedMethods
from .pipeline.pipeline import ModelRepository
from .pipeline.served_model import ModelSource
from .prometheus import add_certificate_metric, add_server_metrics, metrics_server
from .rpc.access_control import AccessInterceptor, AccessPolicy
from .rpc.certificates import ServerCertificate, server_certificate
from .rpc.front_end_server import FrontEndServer, front_end_count
from .rpc.listener import (
    GrpcServer,
    RequestIdInterceptor,
    add_reflection,
    allowed_connections,
    check_ports,
    listening_server,
)
from .rpc.services import DetectorService, HealthService, add_detector_service

if TYPE_CHECKING:
    from .http.server import HttpServer  # needs the extra `http`

_log = logging.getLogger(__name__)

_SERVICES = (
    detector_pb2.DESCRIPTOR.services_by_name["Detector"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
)


async def serve(
    models: Sequence[ModelSource], config: ServeConfig, on_ready: Callable[[str], None]
) -> None:
    """Serve models until SIGTERM or SIGINT. On SIGHUP, reload all models.

    Args:
        models: Bundles (exported models), and names of the models.
        config: Server settings.
        on_ready: Called with the address `host:port` when the server is ready.

    Raises:
        BundleError, BackendError, ServingError: see `detection_server`.
    """
    stop, reload = asyncio.Event(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    is_ready = False

    def request_stop() -> None:
        stop.set()
        if task and not is_ready:  # do not wait for loading and warm-up, which may take minutes
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, request_stop)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    try:
        async with detection_server(models, config, reload) as address:
            is_ready = True
            freeze_garbage_collector()
            on_ready(address)
            notify_service_manager("READY=1")
            await stop.wait()
            notify_service_manager("STOPPING=1")
            grace_s = config.drain_delay_s + config.stop_grace_s
            _log.info("stopping; in-flight requests may take up to %g s", grace_s)
            for number in signals:  # a second signal ends the process immediately
                loop.remove_signal_handler(number)
        _log.info("stopped")
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        _log.info("stopped before the server was ready")
    finally:
        # Remove the handlers before the event loop closes. Otherwise, the loop first closes the
        # socket through which Python reports signals. If a signal arrives then, Python prints an
        # error.
        for number in (*signals, signal.SIGHUP):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def detection_server(
    models: Path | Sequence[ModelSource], config: ServeConfig, reload: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """Serve one or more models within the `with` block. On exit, finish the in-flight requests.

    The health service reports NOT_SERVING until the models are warmed up, and again as soon as the
    `with` block ends. It also reports NOT_SERVING while the first model is unloaded, or has no
    running worker process in its default precision.

    Args:
        models: Folder of one bundle (exported model), or the bundles and names of several models.
        config: Server settings.
        reload: Event. Each time the caller sets it, the bundles are reloaded. None: no such event.

    Yields:
        Address `host:port` at which the server accepts requests.

    Raises:
        BundleError: a bundle is missing or damaged, or lacks a precision of `config`.
        BackendError: the backend does not run on this machine or with the configured batch sizes.
        ServingError: the server cannot listen on its address, a certificate, key or token file is
            invalid, an optional package is not installed, or two models have the same name.
    """
    _check_http_packages(config)
    check_ports(config)
    # Invalid token and certificate files are reported at once, not after the model has loaded.
    policy, certificate = AccessPolicy(config), server_certificate(config)
    sources = [ModelSource(models)] if isinstance(models, Path) else models
    telemetry, lag, cpu = Telemetry(load_tracer(config.tracing)), LoopLag(), CpuCollector()
    with (
        contextlib.closing(telemetry.tracer),
        contextlib.closing(ModelRepository(sources, config, telemetry)) as repository,
        _metrics_server(repository, lag, cpu, config, certificate),
    ):
        await repository.load()
        access = AccessInterceptor(policy, config, repository)
        front_ends = await in_daemon_thread(front_end_count, config)
        interceptors = [RequestIdInterceptor(telemetry.tracer), access]
        server, port = _grpc_server(front_ends, config, certificate, interceptors)
        detector, inference, health = _add_services(server, repository, config)
        ports = 1 if front_ends else 2
        http = _http_server(detector, inference, repository, access, config, ports)
        async with _accepting(server, http, certificate) as stop:
            # Warm up before the task groups below, which would wrap an error in an ExceptionGroup.
            await repository.warm_up()
            reload = reload or asyncio.Event()
            async with (
                repository.running(),
                _background(
                    *(repository.reload_when_set(reload), health.run(), lag.run(), cpu.run()),
                    # If gRPC fails, `wait_for_stop` raises an error. A `FrontEndServer` restarts
                    # its processes instead.
                    *([wait_for_stop(server)] if isinstance(server, grpc.aio.Server) else ()),
                ),
            ):
                health.set_ready()
                address = address_of(config.host, port)
                _log.info("ready at %s", address)
                try:
                    yield address
                finally:
                    health.stop()
                    await asyncio.sleep(config.drain_delay_s)
                    detector.stop_reading()
                    inference.stop_reading()
                    access.stop()
                    with _cancelled_requests_logged(telemetry.metrics, config.stop_grace_s):
                        await stop(config.stop_grace_s)


@contextlib.contextmanager
def _cancelled_requests_logged(metrics: Metrics, grace_s: float) -> Iterator[None]:
    """Context manager: if requests remain after `grace_s` seconds, log the number of them.

    The `with` block stops the server, which cancels these requests at that time. If the block ends
    earlier, nothing is logged.
    """

    def warn() -> None:
        if count := metrics.requests_in_progress:
            _log.warning(
                "stop_grace_s (%g s) is over; number of requests that are cancelled: %d",
                grace_s,
                count,
            )

    timer = asyncio.get_running_loop().call_later(grace_s, warn)
    try:
        yield
    finally:
        timer.cancel()


def _grpc_server(
    front_ends: int,
    config: ServeConfig,
    certificate: ServerCertificate | None,
    interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # generic in stubs only
) -> tuple[GrpcServer, int]:
    """Return a gRPC server that is not started yet, and the port that it listens on.

    `front_ends` is the number of front-end processes. 0: this process accepts the connections.
    """
    if not front_ends:
        return listening_server(config, certificate, interceptors)
    server = FrontEndServer(front_ends, config, certificate, interceptors)
    return server, server.port


@contextlib.asynccontextmanager
async def _accepting(
    server: GrpcServer, http: "HttpServer | None", certificate: ServerCertificate | None
) -> AsyncIterator[Callable[[float], Coroutine[Any, Any, None]]]:
    """Within the `with` block, accept gRPC requests, and HTTP requests if `http` is not None.

    Yields:
        Function that rejects new requests and waits for in-flight ones. Its argument is the maximum
        wait in seconds.
    """

    async def stop(grace_s: float) -> None:
        await asyncio.gather(server.stop(grace_s), *([http.stop(grace_s)] if http else ()))

    async with contextlib.AsyncExitStack() as running:
        if http:
            context = certificate.ssl_context() if certificate else None
            await running.enter_async_context(http.running(context))
        try:
            await server.start()
            yield stop
        finally:
            await server.stop(None)


def _http_server(
    detector: DetectorService,
    inference: InferenceService,
    models: ModelRepository,
    access: AccessInterceptor,
    config: ServeConfig,
    ports: int,
) -> "HttpServer | None":
    """Return the HTTP server, or None if `config.http_port` is not set.

    `ports` is the number of ports on which this process accepts connections: 2 (gRPC and HTTP), or
    1 if front-end processes accept the gRPC connections. Each port gets an equal share of the
    process's limit on open files.
    """
    if config.http_port is None:
        return None
    from .http.endpoint import Transport
    from .http.server import HttpServer, http_app

    transport = Transport(access, models.resources.telemetry.tracer, config)
    app = http_app(detector, inference, models, transport)
    return HttpServer(app, config, allowed_connections(config.max_connections, ports))


def _check_http_packages(config: ServeConfig) -> None:
    """Raise ServingError if `config.http_port` is set and the extra `http` is not installed."""
    if config.http_port is None:
        return
    try:
        from .http import server  # noqa: F401
    except ModuleNotFoundError as error:
        raise ServingError(
            f"http_port needs {error.name}, which is not installed; "
            'install it with pip install "maskrcnn-trt[http]"'
        ) from None


def _add_services(
    server: GrpcServer, models: ModelRepository, config: ServeConfig
) -> tuple[DetectorService, InferenceService, HealthService]:
    detector = DetectorService(models, config)
    add_detector_service(detector, server)
    names = [service.full_name for service in _SERVICES]
    health = HealthService(*names, models=lambda: models.states)
    add_HealthServicer_to_server(health, server)
    inference = InferenceService(models, config, health)
    add_GRPCInferenceServiceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
    server.add_generic_rpc_handlers((UnsupportedMethods(),))
    add_reflection((*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"]), server)
    return detector, inference, health


@contextlib.contextmanager
def _metrics_server(
    models: ModelRepository,
    lag: LoopLag,
    cpu: CpuCollector,
    config: ServeConfig,
    certificate: ServerCertificate | None,
) -> Iterator[None]:
    """Run the Prometheus endpoint within the `with` block if `config.metrics_port` is set."""
    if config.metrics_port is None:
        yield
        return
    registry = models.resources.telemetry.metrics.registry
    add_server_metrics(registry, models, lag, cpu)
    if certificate:
        add_certificate_metric(registry, lambda: certificate.days_left)
    with metrics_server(registry, config.host, config.metrics_port) as url:
        _log.info("metrics at %s", url)
        yield


@contextlib.asynccontextmanager
async def _background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines as tasks within the `with` block, and cancel them on exit."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

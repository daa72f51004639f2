"""The server: load a bundle, listen on its ports, reload on SIGHUP, drain on SIGTERM."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from ..model.bundle.manifest import BundleError
from ..protos.inference import open_inference_pb2
from ..protos.inference.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from ..protos.maskrcnn.v1 import detector_pb2
from .config import ServeConfig, address_of
from .engines.worker_process import freeze_garbage_collector
from .errors import ServingError
from .host import notify_service_manager
from .monitoring.telemetry import Telemetry
from .monitoring.tracing import load_tracer
from .open_inference.service import InferenceService
from .open_inference.unsupported import UnsupportedMethods
from .pipeline.model_lifecycle import ModelLifecycle
from .pipeline.pipeline import Pipeline
from .prometheus.collectors import CpuCollector, LoopLag
from .prometheus.endpoint import add_certificate_metric, add_server_metrics, metrics_server
from .rpc.access_control import AccessInterceptor, AccessPolicy
from .rpc.certificates import ServerCertificate, server_certificate
from .rpc.detector_service import DetectorService, add_detector_service
from .rpc.health import HealthService
from .rpc.listener import add_reflection, allowed_connections, check_ports, listening_server

if TYPE_CHECKING:
    from .http.listener import HttpServer  # needs the extra `http`

_log = logging.getLogger(__name__)

_SERVICES = (
    detector_pb2.DESCRIPTOR.services_by_name["Detector"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
)


async def serve(bundle: Path, config: ServeConfig, on_ready: Callable[[str], None]) -> None:
    """Serve a bundle until SIGTERM or SIGINT. On SIGHUP, reload the bundle.

    Args:
        bundle: Exported bundle folder.
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
        async with detection_server(bundle, config, reload) as address:
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


@contextlib.asynccontextmanager
async def detection_server(
    bundle: Path, config: ServeConfig, reload: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """Serve a bundle within the context. On exit, finish the in-flight requests.

    The health service reports NOT_SERVING until the model is warmed up, after the context's exit,
    and while the model is unloaded or no worker process of the default precision is up.

    Args:
        bundle: Exported bundle folder.
        config: Server settings.
        reload: Event. Each time it is set, the bundle is reloaded.

    Yields:
        Address `host:port` at which the server accepts requests.

    Raises:
        BundleError: the bundle is missing or damaged, or lacks a precision of `config`.
        BackendError: the backend does not run on this machine or with the configured batch sizes.
        ServingError: the server cannot listen on its address, a certificate, key or token file is
            invalid, or a package of an extra is missing.
    """
    _check_http_packages(config)
    check_ports(config)
    # Invalid token and certificate files are reported at once, not after the model has loaded.
    policy, certificate = AccessPolicy(config), server_certificate(config)
    telemetry, lag, cpu = Telemetry(load_tracer(config.tracing)), LoopLag(), CpuCollector()
    with (
        contextlib.closing(telemetry.tracer),
        contextlib.closing(Pipeline(bundle, config, telemetry)) as pipeline,
        _metrics_server(pipeline, lag, cpu, config, certificate),
    ):
        await pipeline.model.load()
        access = AccessInterceptor(policy, config, pipeline)
        server, port = listening_server(config, certificate, telemetry.tracer, access)
        detector, inference, health = _add_services(server, pipeline, config)
        http = _http_server(detector, inference, pipeline, access, config)
        async with _accepting(server, http, certificate) as stop:
            # Before the task groups below, which would wrap its exception in an ExceptionGroup.
            pipeline.admission.set_service_time(await pipeline.model.warm_up())
            reload = reload or asyncio.Event()
            async with (
                pipeline.lifecycle.running(),
                _background(
                    _reload_when_set(reload, pipeline.lifecycle), health.run(), lag.run(), cpu.run()
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
                    await stop(config.stop_grace_s)


@contextlib.asynccontextmanager
async def _accepting(
    server: grpc.aio.Server, http: "HttpServer | None", certificate: ServerCertificate | None
) -> AsyncIterator[Callable[[float], Coroutine[Any, Any, None]]]:
    """Accept requests over gRPC and, if there is an HTTP server, over HTTP within the context.

    Yields:
        Function that rejects new requests, and waits up to its argument in seconds for others.
    """

    async def stop(grace_s: float) -> None:
        await asyncio.gather(server.stop(grace_s), *([http.stop(grace_s)] if http else ()))

    async with contextlib.AsyncExitStack() as running:
        if http:
            context = certificate.ssl_context() if certificate else None
            await running.enter_async_context(http.running(context))
        await server.start()
        try:
            yield stop
        finally:
            await server.stop(None)


def _http_server(
    detector: DetectorService,
    inference: InferenceService,
    pipeline: Pipeline,
    access: AccessInterceptor,
    config: ServeConfig,
) -> "HttpServer | None":
    if config.http_port is None:
        return None
    from .http.app import http_app
    from .http.endpoint import Transport
    from .http.listener import HttpServer

    transport = Transport(access, pipeline.telemetry.tracer, config)
    app = http_app(detector, inference, pipeline, transport)
    return HttpServer(app, config, allowed_connections(config))


def _check_http_packages(config: ServeConfig) -> None:
    """Raise ServingError if `config.http_port` is set and the extra `http` is not installed."""
    if config.http_port is None:
        return
    try:
        from .http import app, listener  # noqa: F401
    except ModuleNotFoundError as error:
        raise ServingError(
            f"http_port needs {error.name}, which is not installed; "
            'install it with pip install "maskrcnn-trt[http]"'
        ) from None


def _add_services(
    server: grpc.aio.Server, pipeline: Pipeline, config: ServeConfig
) -> tuple[DetectorService, InferenceService, HealthService]:
    detector = DetectorService(pipeline, config)
    add_detector_service(detector, server)
    names = [service.full_name for service in _SERVICES]
    health = HealthService(*names, models=lambda: pipeline.model.states)
    add_HealthServicer_to_server(health, server)
    inference = InferenceService(pipeline, config, health)
    add_GRPCInferenceServiceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
    server.add_generic_rpc_handlers((UnsupportedMethods(),))
    add_reflection((*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"]), server)
    return detector, inference, health


@contextlib.contextmanager
def _metrics_server(
    pipeline: Pipeline,
    lag: LoopLag,
    cpu: CpuCollector,
    config: ServeConfig,
    certificate: ServerCertificate | None,
) -> Iterator[None]:
    """Run the Prometheus endpoint within the context if `config.metrics_port` is set."""
    if config.metrics_port is None:
        yield
        return
    registry = pipeline.telemetry.metrics.registry
    add_server_metrics(registry, pipeline, lag, cpu)
    if certificate:
        add_certificate_metric(registry, lambda: certificate.days_left)
    with metrics_server(registry, config.host, config.metrics_port) as url:
        _log.info("metrics at %s", url)
        yield


@contextlib.asynccontextmanager
async def _background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines as tasks within the context, and cancel them on exit."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _reload_when_set(requested: asyncio.Event, lifecycle: ModelLifecycle) -> None:
    """Reload the bundle each time `requested` is set. If that fails, keep the served model."""
    while True:
        await requested.wait()
        requested.clear()
        try:
            await lifecycle.reload()
        except (BundleError, ServingError):
            pass  # `reload` has logged it
        except Exception:
            _log.exception("reloading the bundle failed")

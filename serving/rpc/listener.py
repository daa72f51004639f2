"""gRPC server setup: port, connection limits, request IDs, reflection."""

import logging
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ..config import ServeConfig, address_of
from ..errors import ServingError
from ..messages import REQUEST_ID_KEY
from ..monitoring.logs import name_call
from ..monitoring.tracing import Tracer
from .access_control import AccessInterceptor
from .certificates import ServerCertificate

_log = logging.getLogger(__name__)

# Time for a new connection to complete the TLS and HTTP/2 handshakes.
_HANDSHAKE_MS = 20_000
# Time for a client to answer a keepalive ping.
_PING_TIMEOUT_MS = 20_000
# Maximum number of concurrent calls per connection. Clients delay further calls.
_MAX_STREAMS = 256
# Limit on calls that wait to be accepted, over all connections. Above the limit gRPC cancels a
# growing share of new calls of any client, and above twice the limit all of them. The limit is a
# multiple of `_MAX_STREAMS`, so that no connection can reach it alone.
_MAX_PENDING_CALLS = 32 * _MAX_STREAMS
# Minimum interval of client pings while no data is sent to the client. A client that pings more
# often is disconnected. Our own client pings every `client.connection.KEEPALIVE_S` during calls.
_CLIENT_PING_MS = 10_000
# Number of file descriptors that the process needs in addition to those of connections.
_OTHER_FILES = 256

_Handler = Any
_Behaviour = Callable[[Any, Any], Awaitable[Any]]


def listening_server(
    config: ServeConfig,
    certificate: ServerCertificate | None,
    tracer: Tracer,
    access: AccessInterceptor,
) -> tuple[grpc.aio.Server, int]:
    """Create a gRPC server and bind it to its port. It has no services and is not started.

    Args:
        config: Server settings.
        certificate: TLS certificate. None: connections are not encrypted.
        tracer: Records a span per call.
        access: Interceptor that checks and limits the calls.

    Returns:
        The server and its port.

    Raises:
        ServingError: the server cannot listen on the address.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_server_fault)
    interceptors = [RequestIdInterceptor(tracer), access]
    server = grpc.aio.server(interceptors=interceptors, options=_options(config))
    address = address_of(config.host, config.port)
    try:
        if certificate is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, certificate.grpc_credentials())
    except RuntimeError:
        raise ServingError(
            f"cannot listen on {address}; "
            "choose an address of this machine and a free port; port 0 selects one"
        ) from None


def check_ports(config: ServeConfig) -> None:
    """Check that the server can listen on its ports, before it loads a model.

    Raises:
        ServingError: a port is in use, or the host is not an address of this machine.
    """
    for name, port in config.ports.items():
        try:
            check_port(config.host, port)
        except socket.gaierror:
            continue  # gRPC may resolve a host name that this function does not
        except OSError as error:
            raise ServingError(
                f"cannot listen on {address_of(config.host, port)} for {name} ({error.strerror}); "
                "choose an address of this machine and a free port; port 0 selects one"
            ) from None


def check_port(host: str, port: int) -> None:
    """Raise OSError if this process cannot listen on a port. 0: any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()  # gRPC too listens on both
    socket.create_server((host, port), family=family, dualstack_ipv6=both).close()


def add_reflection(services: Iterable[ServiceDescriptor], server: grpc.aio.Server) -> None:
    """Add gRPC server reflection, with which clients such as grpcurl discover the services.

    Args:
        services: Services to list. Their .proto files must not import others.
        server: Server that is not started yet.
    """
    all_services = (*services, reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"])
    # The services are in different descriptor pools; reflection needs them in one.
    pool = DescriptorPool()
    for service in all_services:
        pool.AddSerializedFile(service.file.serialized_pb)
    names = [service.full_name for service in all_services]
    reflection.enable_server_reflection(names, server, pool)


class RequestIdInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # see AccessInterceptor
    """gRPC interceptor that traces each call, and gives it an ID for logs and trailing metadata.

    Calls of the health and reflection services are excluded, because they are frequent.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the method's handler, wrapped so that each call gets an ID and a span."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            self._traced(getattr(handler, kind), method),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _traced(self, behaviour: _Behaviour, method: str) -> _Behaviour:
        async def traced(request: Any, context: Any) -> Any:
            metadata = dict(context.invocation_metadata() or ())
            call_id = name_call(str(metadata.get(REQUEST_ID_KEY, "")))
            context.set_trailing_metadata(((REQUEST_ID_KEY, call_id),))
            with self._tracer.call(method, context):
                return await behaviour(request, context)

        return traced


def _is_server_fault(record: logging.LogRecord) -> bool:
    """Log filter that drops gRPC's records of disconnected clients and undecodable metadata."""
    # The message of UnicodeDecodeError would quote the metadata, which can be a token.
    client_faults = grpc.aio.InternalError, UnicodeDecodeError
    return record.exc_info is None or not isinstance(record.exc_info[1], client_faults)


def _options(config: ServeConfig) -> list[tuple[str, int]]:
    options = {
        "grpc.max_receive_message_length": config.max_message_mb << 20,
        "grpc.max_send_message_length": -1,
        "grpc.so_reuseport": 0,  # otherwise two servers could share a port unnoticed
        "grpc.max_allowed_incoming_connections": allowed_connections(config),
        "grpc.max_concurrent_streams": _MAX_STREAMS,
        "grpc.server.max_pending_requests": _MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": 2 * _MAX_PENDING_CALLS,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_MS,
        "grpc.http2.settings_timeout": _HANDSHAKE_MS,
        "grpc.keepalive_time_ms": _milliseconds(config.keepalive_s),
        "grpc.keepalive_timeout_ms": _PING_TIMEOUT_MS,
        "grpc.http2.ping_timeout_ms": _PING_TIMEOUT_MS,  # applies while nothing is being sent
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": _CLIENT_PING_MS,
    }
    if config.max_connection_age_s is not None:
        options["grpc.max_connection_age_ms"] = _milliseconds(config.max_connection_age_s)
        options["grpc.max_connection_age_grace_ms"] = _milliseconds(config.stop_grace_s)
    return list(options.items())


def allowed_connections(config: ServeConfig) -> int:
    """Return `max_connections`, or fewer per port if the limit on open files requires it.

    First, the process's soft limit on open files is raised as far as needed and allowed.
    """
    wanted, ports = config.max_connections, 1 if config.http_port is None else 2
    needed = ports * wanted + _OTHER_FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in limits)
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    if soft >= needed:
        return wanted
    allowed = max(soft - _OTHER_FILES, soft // 2) // ports
    _log.warning(
        "the process may open %d files, so the server allows %d connections per port instead of "
        "%d; set a lower max_connections, or raise the limit with ulimit -n",
        soft,
        allowed,
        wanted,
    )
    return allowed


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)

"""gRPC server setup: port, connection limits, request IDs, reflection."""

import logging
import math
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from ..config import ServeConfig, address_of
from ..errors import ServingError
from ..grpc_status import drop_client_faults
from ..messages import REQUEST_ID_KEY
from ..monitoring.logs import set_request_id
from ..monitoring.telemetry import Tracer
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
# Flow-control window of a connection and of each call: the number of bytes that are received before
# a call reads them. gRPC's own estimate (`bdp_probe`) has no upper limit, and grows while processes
# wait for the CPU. 4 MiB allow 40 MiB/s at a round-trip time of 100 ms.
_WINDOW_BYTES = 4 << 20
# Minimum interval of client pings while no data is sent to the client. A client that pings more
# often is disconnected. Our own client pings every `client.connection.KEEPALIVE_S` during calls.
_CLIENT_PING_MS = 10_000
# Maximum number of HTTP connections that the kernel holds until the server accepts them.
BACKLOG = 1024
# Maximum number of wrapped handlers that an interceptor keeps. The server has fewer methods, but
# clients choose the names of unsupported methods, which get handlers too.
MAX_HANDLERS = 64
# Number of file descriptors that the process needs in addition to those of connections.
_OTHER_FILES = 256

_Handler = Any
_Behaviour = Callable[[Any, Any], Awaitable[Any]]


def listening_server(
    config: ServeConfig,
    certificate: ServerCertificate | None,
    interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # generic in stubs only
) -> tuple[grpc.aio.Server, int]:
    """Create a gRPC server without services, and bind it to its port. It is not started yet.

    Args:
        config: Server settings.
        certificate: TLS certificate. None: connections are not encrypted.
        interceptors: Interceptors of all calls, the outermost first.

    Returns:
        The server and its port.

    Raises:
        ServingError: the server cannot listen on the address.
    """
    drop_client_faults()
    server = grpc.aio.server(interceptors=interceptors, options=server_options(config))
    address = address_of(config.host, config.port)
    try:
        if certificate is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, certificate.grpc_credentials())
    except RuntimeError:
        raise listen_error(address) from None


def listen_error(address: str, details: str = "") -> ServingError:
    """Return the error to raise if the server cannot listen on `address`.

    `details` follows the address in the message.
    """
    return ServingError(
        f"cannot listen on {address}{details}; "
        "choose an address of this machine and a free port (0: any free port)"
    )


def check_ports(config: ServeConfig) -> None:
    """Check that the server can listen on all its ports. Call it before models are loaded.

    Raises:
        ServingError: a port is in use, or the host is not an address of this machine.
    """
    for name, port in config.ports.items():
        listening_socket(config.host, port, name).close()


def listening_socket(host: str, port: int, name: str) -> socket.socket:
    """Return a socket that listens on a port.

    Args:
        host: Address or host name.
        port: Port number. 0: any free port.
        name: Name of the port's setting, for the error message.

    Raises:
        ServingError: the port is in use, or the host is not an address of this machine.
    """
    both = host == "::" and socket.has_dualstack_ipv6()  # IPv4 and IPv6, as gRPC does
    try:
        family, address = bind_address(host, port)
        return socket.create_server(address, family=family, dualstack_ipv6=both, backlog=BACKLOG)
    except OSError as error:
        # `create_server` appends the address to the reason, but the message already names it.
        reason = str(error.strerror).partition(" (while attempting")[0]
        raise listen_error(address_of(host, port), f" for {name} ({reason})") from None


def bind_address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the address family and the socket address of a host to listen on.

    If a host name has addresses of both families, the IPv4 address is returned.

    Raises:
        OSError: the host name is unknown.
    """
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        found = socket.getaddrinfo(host or None, port, type=kind, flags=flags)
    except UnicodeError:  # such as a name with an empty label
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is not a host name") from None
    family, _, _, _, address = min(found, key=itemgetter(0))  # AF_INET is less than AF_INET6
    return family, address


class GrpcServer(Protocol):
    """Interface of gRPC servers: `grpc.aio.Server` and `front_end_server.FrontEndServer`.

    `grpc.aio.Server` accepts connections in this process, `FrontEndServer` in front-end processes.
    """

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
        """Add handlers of gRPC services."""

    async def start(self) -> None:
        """Start to accept calls."""

    async def stop(self, grace: float | None = None) -> None:
        """Reject new calls. Cancel open ones after `grace` seconds. None: cancel them at once."""


def add_reflection(services: Iterable[ServiceDescriptor], server: GrpcServer) -> None:
    """Add gRPC server reflection, with which clients such as grpcurl discover the services.

    Args:
        services: Services to list. Their .proto files must not import other .proto files, because
            imported files are not added to the descriptor pool.
        server: Server that is not started yet.
    """
    all_services = (*services, reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"])
    # The services are in different descriptor pools; reflection needs them in one.
    pool = DescriptorPool()
    for service in all_services:
        pool.AddSerializedFile(service.file.serialized_pb)
    names = [service.full_name for service in all_services]
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)  # type: ignore[attr-defined]
    add_ServerReflectionServicer_to_server(servicer, server)


class RequestIdInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """gRPC interceptor that traces each call, and gives it an ID for logs and trailing metadata.

    Calls of the health and reflection services are excluded, because they are frequent.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._with_ids = lru_cache(MAX_HANDLERS)(self._traced)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the method's handler, wrapped so that each call gets an ID and a trace span."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        return self._with_ids(handler, method)

    def _traced(self, handler: _Handler, method: str) -> _Handler:
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        behaviour: _Behaviour = getattr(handler, kind)

        async def traced(request: Any, context: Any) -> Any:
            metadata = dict(context.invocation_metadata() or ())
            call_id = set_request_id(str(metadata.get(REQUEST_ID_KEY, "")))
            context.set_trailing_metadata(((REQUEST_ID_KEY, call_id),))
            with self._tracer.call(method, context):
                return await behaviour(request, context)

        return getattr(grpc, f"{kind}_rpc_method_handler")(
            traced, handler.request_deserializer, handler.response_serializer
        )


def server_options(config: ServeConfig, front_ends: int = 0) -> list[tuple[str, int]]:
    """Return the gRPC options of each process that accepts gRPC connections.

    `front_ends` is the number of front-end processes. 0: the server's process accepts connections.
    Each front-end process accepts an equal share of `config.max_connections`. No other limit is
    divided: the limit on pending calls applies to each process, and the remaining limits apply to
    each connection.
    """
    connections = math.ceil(config.max_connections / max(1, front_ends))
    ports = 1 if front_ends or config.http_port is None else 2
    options = {
        "grpc.max_receive_message_length": config.max_message_mb << 20,
        "grpc.max_send_message_length": -1,
        # Off without front-end processes. Otherwise, two servers could share a port unnoticed.
        "grpc.so_reuseport": int(front_ends > 0),
        "grpc.max_allowed_incoming_connections": allowed_connections(connections, ports),
        "grpc.max_concurrent_streams": _MAX_STREAMS,
        "grpc.server.max_pending_requests": _MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": 2 * _MAX_PENDING_CALLS,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_MS,
        "grpc.http2.settings_timeout": _HANDSHAKE_MS,
        "grpc.http2.bdp_probe": 0,
        "grpc.http2.lookahead_bytes": _WINDOW_BYTES,
        # Without `bdp_probe`, the default is 16 KiB, which costs CPU time for large messages.
        "grpc.http2.max_frame_size": _WINDOW_BYTES,
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


def allowed_connections(wanted: int, ports: int) -> int:
    """Return the number of connections per port, up to `wanted`, that the open-file limit allows.

    First, the soft limit on the process's open files is raised as far as needed, up to the hard
    limit. Front-end processes inherit the raised limit.

    Args:
        wanted: Maximum number of connections per port in the server's settings.
        ports: Number of ports on which a process accepts connections.
    """
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
        "the process may open %d files, so it accepts %d connections per port instead of %d; set a "
        "lower max_connections, or raise the limit with ulimit -n",
        soft,
        allowed,
        wanted,
    )
    return allowed


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)

"""How the server listens: what it lets connections do before any request is looked at."""

import logging
import resource
import sys

import grpc

from ..config import ServeConfig, address_of
from ..errors import ServingError
from ..monitoring.tracing import Tracer
from .calls import CallWatch
from .receiving import Reception

_log = logging.getLogger(__name__)

_HANDSHAKE_MS = 20_000
"""For a connection to say that it speaks TLS and HTTP/2."""
_PING_TIMEOUT_MS = 20_000
"""For a connection to show that someone is still there."""
_MAX_STREAMS = 1000
"""Calls at once of a connection."""
_LEAST_UNSEEN = 256
"""Calls that may wait to be looked at, of all connections; from there on gRPC ends more and more of
those that come, and all at twice as many. With fewer it would end some of a burst."""
_CLIENT_PING_MS = 10_000
"""For a client to ping no more often than while it is sent nothing, be calls open or not; one that
does is sent away. Ours asks every `client.connection.KEEPALIVE_S` while a call is open."""
_OTHER_FILES = 256
"""That the process has open, beside connections."""


def listening_server(
    config: ServeConfig,
    credentials: grpc.ServerCredentials | None,
    tracer: Tracer,
    reception: Reception,
) -> tuple[grpc.aio.Server, int]:
    """A server without services that is bound to its port, and the port.

    Args:
        config: What it lets its clients do.
        credentials: What it shows its clients; none, it does not encrypt.
        tracer: Traces calls.
        reception: Lets calls in.

    Raises:
        ServingError: the address cannot be listened on.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    interceptors = [CallWatch(tracer), reception]
    server = grpc.aio.server(interceptors=interceptors, options=_options(config))
    address = address_of(config.host, config.port)
    try:
        if credentials is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ServingError(
            f"cannot listen on {address}; "
            "choose an address of this machine and a free port, or port 0"
        ) from None


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record says more than that a client was gone, or sent text that is none.

    The latter would quote the text, which can be a token.
    """
    failures = grpc.aio.InternalError, UnicodeDecodeError
    return record.exc_info is None or not isinstance(record.exc_info[1], failures)


def _options(config: ServeConfig) -> list[tuple[str, int]]:
    unseen = max(_LEAST_UNSEEN, config.queue_size)
    options = {
        "grpc.max_receive_message_length": config.max_message_mb << 20,
        "grpc.max_send_message_length": -1,
        "grpc.so_reuseport": 0,  # otherwise two servers could share a port unnoticed
        "grpc.max_allowed_incoming_connections": _allowed_connections(config.max_connections),
        "grpc.max_concurrent_streams": _MAX_STREAMS,
        "grpc.server.max_pending_requests": unseen,
        "grpc.server.max_pending_requests_hard_limit": 2 * unseen,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_MS,
        "grpc.http2.settings_timeout": _HANDSHAKE_MS,
        "grpc.keepalive_time_ms": _milliseconds(config.keepalive_s),
        "grpc.keepalive_timeout_ms": _PING_TIMEOUT_MS,
        "grpc.http2.ping_timeout_ms": _PING_TIMEOUT_MS,  # counts where nothing is to be sent
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": _CLIENT_PING_MS,
    }
    if config.max_connection_age_s is not None:
        options["grpc.max_connection_age_ms"] = _milliseconds(config.max_connection_age_s)
        options["grpc.max_connection_age_grace_ms"] = _milliseconds(config.stop_grace_s)
    return list(options.items())


def _allowed_connections(wanted: int) -> int:
    """As many connections as are wanted, or as the process may open files for."""
    needed = wanted + _OTHER_FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in limits)
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    if soft >= needed:
        return wanted
    allowed = max(soft - _OTHER_FILES, soft // 2)
    _log.warning(
        "the process may open %d files, so it takes %d connections at once instead of %d; set a "
        "lower max_connections, or a higher limit with ulimit -n",
        soft,
        allowed,
        wanted,
    )
    return allowed


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)

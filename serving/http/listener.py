"""HTTP server in the event loop of the gRPC server: port, TLS and shutdown."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from ..config import ServeConfig, address_of
from ..errors import ServingError
from ..monitoring.logs import shorten_accept_failures
from .connection import HttpConnection

_log = logging.getLogger(__name__)

# Seconds for a new connection to complete the TLS handshake.
_HANDSHAKE_S: Final = 20.0
# Seconds after which a connection without a request is closed.
_IDLE_S: Final = 75


class HttpServer:
    """HTTP server of an ASGI application."""

    def __init__(self, app: ASGIApp, config: ServeConfig, max_connections: int) -> None:
        """Create the server.

        Args:
            app: ASGI application.
            config: Settings of the server.
            max_connections: Maximum number of connections. Further connections are closed at once.
        """
        # uvicorn logs a warning for each invalid request, and anybody can send thousands of them.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        shorten_accept_failures()
        self._settings = config
        self._config = uvicorn.Config(
            app,
            http=HttpConnection,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
        )
        self._server = _UvicornServer(self._config, config, max_connections)

    @contextlib.asynccontextmanager
    async def running(self, context: ssl.SSLContext | None) -> AsyncIterator[None]:
        """Context manager: accept connections. On exit, stop without a grace period.

        Args:
            context: TLS settings. None: connections are not encrypted.

        Raises:
            ServingError: the server cannot listen on the address.
        """
        listener = _listening_socket(self._settings.host, self._settings.http_port or 0)
        scheme, port = "https" if context else "http", listener.getsockname()[1]
        self._server.context = context
        self._task = asyncio.create_task(self._server.serve([listener]))
        _log.info("HTTP at %s://%s/", scheme, address_of(self._settings.host, port))
        try:
            yield
        finally:
            await self.stop(0)

    async def stop(self, grace_s: float) -> None:
        """Close the port and idle connections. Cancel open requests after `grace_s` seconds."""
        if not self._server.should_exit:
            # With 0, uvicorn would cancel before it checks whether requests are open. It accepts
            # fractions, although the setting is declared as an integer.
            self._config.timeout_graceful_shutdown = max(grace_s, 0.1)  # type: ignore[assignment]
            self._server.should_exit = True
        await self._task


def _listening_socket(host: str, port: int) -> socket.socket:
    try:
        both = host == "::" and socket.has_dualstack_ipv6()  # listen on IPv4 too, as gRPC does
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        raise ServingError(
            f"cannot listen on {address_of(host, port)} for HTTP ({error.strerror}); "
            "choose another --http-port, or 0 for a free one"
        ) from None


class _UvicornServer(uvicorn.Server):
    """uvicorn server that handles no signals, and limits the number of connections."""

    def __init__(self, config: uvicorn.Config, settings: ServeConfig, max_connections: int) -> None:
        super().__init__(config)
        self._settings = settings
        self._max_connections = max_connections
        self.context: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def protocol() -> asyncio.Protocol:
            return HttpConnection(self, self._settings, self._max_connections)

        handshake_s = _HANDSHAKE_S if self.context else None
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                protocol, sock=listener, ssl=self.context, ssl_handshake_timeout=handshake_s
            )
            for listener in sockets or []
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

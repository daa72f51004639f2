"""HTTP server in the event loop of the gRPC server: routes, browser page, TLS and shutdown."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..config import ServeConfig, address_of
from ..monitoring.logs import shorten_accept_failures
from ..open_inference.service import InferenceService
from ..pipeline.pipeline import ModelRepository
from ..rpc.listener import BACKLOG, listening_socket
from ..rpc.services import DetectorService
from .connection import HttpConnection
from .detection import DetectionRoutes
from .endpoint import JsonResponse, Transport, http_error_response
from .open_inference import OpenInferenceRoutes
from .openapi import openapi_document

# Files of the browser page and their media types, by URL path.
_PAGE_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Headers of all responses. The page has neither inline scripts nor styles, and loads nothing from
# other servers. The user's images are blob URLs.
_SECURITY_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

_log = logging.getLogger(__name__)

# Seconds for a new connection to complete the TLS handshake.
_HANDSHAKE_S: Final = 20.0
# If a client sends no request for this many seconds after a response, its connection is closed.
_IDLE_S: Final = 75


def http_app(
    detector: DetectorService,
    inference: InferenceService,
    models: ModelRepository,
    transport: Transport,
) -> ASGIApp:
    """Return the ASGI application of the HTTP server.

    Args:
        detector: gRPC service that processes requests below `/v1`.
        inference: gRPC service that processes requests below `/v2`.
        models: Served models, for requests below `/v2`.
        transport: Access control, tracing and settings.
    """
    app = Starlette(
        routes=[
            *DetectionRoutes(detector, transport).routes(),
            *OpenInferenceRoutes(inference, models, transport).routes(),
            _file_route("/openapi.json", JsonResponse(openapi_document())),
            *(_file_route(path, _page_file(*file)) for path, file in _PAGE_FILES.items()),
        ],
        exception_handlers={HTTPException: _handle_http_error},
    )
    # Redirects are off, because they would lead to the host in the request's Host header, which
    # the client chooses.
    app.router.redirect_slashes = False
    return app


def _page_file(name: str, media_type: str) -> Response:
    content = files(__package__).joinpath("page", name).read_bytes()
    return Response(content, media_type=media_type)


def _file_route(path: str, response: Response) -> Route:
    async def respond(_: Request) -> Response:
        return response

    return Route(path, respond)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        error.detail = "no such path; /openapi.json lists all paths"
    elif error.status_code == 405:
        methods = (error.headers or {}).get("Allow")
        error.detail = f"this path has no method {request.method}; use {methods}"
    return http_error_response(error)


class HttpServer:
    """HTTP server of an ASGI application."""

    def __init__(self, app: ASGIApp, config: ServeConfig, max_connections: int) -> None:
        """Create the HTTP server.

        Args:
            app: ASGI application.
            config: Settings of the server.
            max_connections: Maximum number of connections. Further connections are closed at once.
        """
        # uvicorn logs a warning for each invalid request, and anybody can send thousands of them.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        shorten_accept_failures()
        self._settings = config
        self._max_connections = max_connections
        self._config = uvicorn.Config(
            app,
            http=HttpConnection,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=list(_SECURITY_HEADERS.items()),
            timeout_keep_alive=_IDLE_S,
        )
        self._server = _UvicornServer(self._config, config)

    @contextlib.asynccontextmanager
    async def running(self, context: ssl.SSLContext | None) -> AsyncIterator[None]:
        """Context manager: accept connections. On exit, stop without a grace period.

        Args:
            context: TLS settings. None: connections are not encrypted.

        Raises:
            ServingError: the server cannot listen on the address.
        """
        host = self._settings.host
        listener = listening_socket(host, self._settings.http_port or 0, "http_port")
        scheme, port = "https" if context else "http", listener.getsockname()[1]
        self._server.context = context
        limited = _LimitedListener(listener, self._max_connections)
        self._task = asyncio.create_task(self._server.serve([limited]))
        _log.info("HTTP at %s://%s/", scheme, address_of(host, port))
        try:
            yield
        finally:
            await self.stop(0)

    async def stop(self, grace_s: float) -> None:
        """Close the port and idle connections. Cancel open requests after `grace_s` seconds."""
        if not self._server.should_exit:
            # With 0, uvicorn's wait for open requests would time out before it checks whether there
            # are any. uvicorn accepts fractions, although it declares the setting as an integer.
            self._config.timeout_graceful_shutdown = max(grace_s, 0.1)  # type: ignore[assignment]
            self._server.should_exit = True
        await self._task


class _LimitedListener(socket.socket):
    """Listening socket that closes new connections while too many are open."""

    # Connections are counted here, because asyncio reports one only after its TLS handshake.

    def __init__(self, listener: socket.socket, max_connections: int) -> None:
        """Take over the file descriptor of a listening socket."""
        super().__init__(fileno=listener.detach())
        self._max_connections = max_connections
        self._connections: set[socket.socket] = set()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If it exceeds the limit, close it and raise an error."""
        connection, address = super().accept()
        if len(self._connections) >= self._max_connections:
            connection.close()
            raise ConnectionAbortedError  # asyncio ignores it
        return _CountedConnection(connection, self._connections), address


class _CountedConnection(socket.socket):
    """Accepted connection that removes itself from the set `connections` when it is closed."""

    def __init__(self, accepted: socket.socket, connections: set[socket.socket]) -> None:
        """Take over the file descriptor of a connection, and add this object to the set."""
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self._connections = connections
        connections.add(self)

    def close(self) -> None:
        self._connections.discard(self)
        super().close()


class _UvicornServer(uvicorn.Server):
    """uvicorn server that handles no signals."""

    def __init__(self, config: uvicorn.Config, settings: ServeConfig) -> None:
        super().__init__(config)
        self._settings = settings
        self.context: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def protocol() -> asyncio.Protocol:
            return HttpConnection(self, self._settings)

        handshake_s = _HANDSHAKE_S if self.context else None
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                protocol,
                sock=listener,
                backlog=BACKLOG,  # asyncio calls `listen` again, by default with 100
                ssl=self.context,
                ssl_handshake_timeout=handshake_s,
            )
            for listener in sockets or []
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

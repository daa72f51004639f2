"""ASGI application of the server: API routes, OpenAPI document and browser page."""

from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..open_inference.service import InferenceService
from ..pipeline.model_repository import ModelRepository
from ..rpc.detector_service import DetectorService
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
# The page has neither inline scripts nor styles, and loads nothing from other servers. The user's
# images are blob URLs.
_SECURITY_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


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
        models: Served models, used by both services.
        transport: Access control, tracing and settings.
    """
    app = Starlette(
        routes=[
            *DetectionRoutes(detector, models, transport).routes(),
            *OpenInferenceRoutes(inference, models, transport).routes(),
            _file_route("/openapi.json", JsonResponse(openapi_document())),
            *(_file_route(path, _page_file(*file)) for path, file in _PAGE_FILES.items()),
        ],
        exception_handlers={HTTPException: _handle_http_error},
    )
    # Redirects are off, because they would lead to the host in the request's Host header, which
    # the client chooses.
    app.router.redirect_slashes = False
    return _SecurityHeaders(app)


def _page_file(name: str, media_type: str) -> Response:
    content = files(__package__).joinpath("page", name).read_bytes()
    return Response(content, media_type=media_type)


def _file_route(path: str, response: Response) -> Route:
    async def respond(_: Request) -> Response:
        return response

    return Route(path, respond)


async def _handle_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        error.detail = "no such path; /openapi.json lists all paths"
    return http_error_response(error)


class _SecurityHeaders:
    """ASGI middleware that adds the headers in `_SECURITY_HEADERS` to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [(k.encode(), v.encode()) for k, v in _SECURITY_HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers: list[Any] = list(message["headers"])
                message = {**message, "headers": headers + self._headers}
            await send(message)

        await self._app(scope, receive, send_with_headers)

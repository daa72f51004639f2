"""Handling of one HTTP request: context, request ID, tracing, access control, JSON response."""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import Message
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..config import ServeConfig, address_of
from ..errors import (
    ExpiredError,
    ForbiddenError,
    InvalidRequestError,
    ServingError,
    StoppingError,
)
from ..grpc_status import CallOutcome, status_and_message
from ..messages import REQUEST_ID_KEY
from ..monitoring.logs import set_request_id
from ..monitoring.telemetry import Tracer
from ..rpc.access_control import ADMIN_METHODS, AccessInterceptor

# HTTP status code by gRPC status code. All other gRPC status codes become 500.
_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Seconds after which clients may repeat a request that an overloaded server has rejected.
_RETRY_AFTER_S: Final = 1
# Headers that browsers add to requests of web pages.
_BROWSER_HEADERS: Final = ("origin", "sec-fetch-site")


class AbortedCallError(Exception):
    """Error that ends an aborted request. The `HttpCall` holds the gRPC status and the message."""


class HttpCall(CallOutcome):
    """Context of an HTTP request. Services and access control use it like gRPC's own context.

    Call `end` after the response has been sent or the client has disconnected.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_bytes: int) -> None:
        """Create the context of an ASGI request.

        Args:
            scope: Scope of the request.
            receive: ASGI function that returns the next message of the client.
            send: ASGI function that sends a message to the client.
            max_bytes: Maximum size of the request's body in bytes.
        """
        super().__init__()
        self.request = Request(scope, receive, send)
        self._max_bytes = max_bytes
        # Body of the request, from when it is received until `take_body` is called.
        self.body = b""
        # Whether the client has disconnected before the response was complete.
        self.is_disconnected = False

    def peer(self) -> str:
        """Return the client's address as gRPC formats it, such as `ipv4:127.0.0.1:50000`."""
        host, port = self.request.scope["client"] or ("", 0)
        with contextlib.suppress(ValueError):
            # A socket for IPv4 and IPv6 reports 127.0.0.1 as ::ffff:127.0.0.1.
            address = ipaddress.ip_address(host)
            host = str(getattr(address, "ipv4_mapped", None) or address)
        return f"{'ipv6' if ':' in host else 'ipv4'}:{address_of(host, port)}"

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return the headers of the request."""
        return self.request.headers.items()

    async def read(self) -> bytes:
        """Receive the body of the request and return it.

        Raises:
            HTTPException: the body is larger than `max_bytes`, or compressed.
            starlette.requests.ClientDisconnect: the client disconnected.
        """
        headers = self.request.headers
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "the body is compressed; send it without Content-Encoding")
        size, chunks = int(headers.get("content-length", 0)), []
        self._check_size(size)
        size = 0
        async for chunk in self.request.stream():
            size += len(chunk)
            self._check_size(size)
            chunks.append(chunk)
        return b"".join(chunks)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise HTTPException(
                413,
                f"the body is larger than {self._max_bytes} bytes; send a smaller image, or raise "
                "the server's max_message_mb",
            )

    def take_body(self) -> bytes:
        """Return the body of the request, and drop this object's reference to it."""
        body, self.body = self.body, b""
        return body

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Store the gRPC status and its message, and raise AbortedCallError to end the request."""
        self._code, self._details = code, details
        raise AbortedCallError(details)

    @contextlib.asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """Context manager: cancel the code in the `async with` block if the client disconnects.

        Read the request's body before the block, because all messages of the client that arrive
        during the block are discarded.
        """
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._cancel_on_disconnect(task))
        try:
            yield
        finally:
            watcher.cancel()

    async def _cancel_on_disconnect(self, task: asyncio.Task[Any]) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self.is_disconnected = True
        task.cancel()


@dataclass(frozen=True)
class Transport:
    """Access control, tracer and settings of the server. HTTP and gRPC use the same objects."""

    access: AccessInterceptor
    tracer: Tracer
    config: ServeConfig


class Endpoint:
    """ASGI application of one HTTP route."""

    def __init__(
        self,
        transport: Transport,
        verb: str,
        path: str,
        method: str,
        respond: Callable[[HttpCall], Awaitable[Response]],
    ) -> None:
        """Create the endpoint.

        Args:
            transport: Access control, tracing and settings.
            verb: HTTP method. The body of a POST request is read before `respond` is called.
            path: Path of the route. Parameters are in braces, as in `/v1/samples/{name}`.
            method: Full name of the gRPC method whose rules for access and limits apply.
            respond: Function that computes the response to a request.
        """
        self._transport = transport
        self._verb = verb
        self._path = path
        self._method = method
        self._respond = respond

    @property
    def route(self) -> Route:
        """Route from the path to this endpoint."""
        return Route(self._path, self, methods=[self._verb])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: check access, call `respond`, and send the response or the error."""
        call = HttpCall(scope, receive, send, self._transport.config.max_message_mb << 20)
        call_id = set_request_id(call.request.headers.get(REQUEST_ID_KEY, ""))
        try:
            tracing = self._transport.tracer.http_request(scope["method"], self._path, call)
            with tracing as record_status:
                response = await self._response_to(call)
                record_status(response.status_code)
            if not call.is_disconnected:
                response.headers[REQUEST_ID_KEY] = call_id
                await _send(response, send)
        finally:
            call.end()

    async def _response_to(self, call: HttpCall) -> Response:
        try:
            return await self._transport.access.run(self._method, call, self._handle)
        except AbortedCallError:
            return error_response(call.code() or grpc.StatusCode.UNKNOWN, call.details())
        except HTTPException as error:
            cause = error.__cause__
            kind = type(cause) if isinstance(cause, ServingError) else InvalidRequestError
            # The log shows only the gRPC status of `reason`, so the message has the HTTP status.
            reason = kind(f"HTTP status {error.status_code}: {error.detail}")
            self._transport.access.record_rejection(self._method, call.peer(), reason)
            return http_error_response(error)
        except ClientDisconnect:
            call.is_disconnected = True
            return Response(status_code=499)
        except asyncio.CancelledError:
            if call.is_disconnected:
                return Response(status_code=499)
            # The server stops, and its grace period is over.
            return error_response(*status_and_message(StoppingError("the server is stopping")))
        except Exception as error:
            return error_response(*status_and_message(error))

    async def _handle(self, call: Any) -> Response:
        self._check_origin(call)
        if self._verb != "POST":
            return await self._respond(call)
        pending = self._transport.access.pending_messages(self._method)
        try:
            # Only `call` holds the body, so that `respond` can free it once it is decoded.
            call.body = await pending.next(call, self._transport.config.receive_timeout_s) or b""
        except ExpiredError as error:
            # Other ExpiredErrors become 504. Here the client is late, not the server, hence 408.
            raise HTTPException(408, str(error)) from error
        async with call.cancelled_on_disconnect():
            return await self._respond(call)

    def _check_origin(self, call: HttpCall) -> None:
        """Raise ForbiddenError if the request loads or unloads models and comes from a web page.

        This applies to every web page, the server's own page included.
        """
        # Any web page in the operator's browser can send requests to a server on the operator's
        # machine. The server would treat them as requests of a local client.
        headers = call.request.headers
        if self._method in ADMIN_METHODS and any(name in headers for name in _BROWSER_HEADERS):
            raise ForbiddenError(
                "web pages must not load or unload models; send the request from a client outside "
                "the browser"
            )


class JsonResponse(Response):
    """HTTP response whose body is JSON: a value to serialise, or bytes that are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body of the response: `content` as JSON, or unchanged if it is bytes."""
        return content if isinstance(content, bytes) else to_json(content)


def error_response(status: grpc.StatusCode, message: str) -> Response:
    """Return the HTTP response for a gRPC status code and an error message."""
    code = _STATUS.get(status, 500)
    headers = {}
    if code == 503:
        headers["retry-after"] = str(_RETRY_AFTER_S)
    elif code == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonResponse({"error": message}, code, headers)


def http_error_response(error: HTTPException) -> Response:
    """Return the HTTP response for an error of the HTTP layer, such as an unknown path."""
    return JsonResponse({"error": error.detail}, error.status_code, error.headers)


async def _send(response: Response, send: Send) -> None:
    """Send an HTTP response. Return when the transport is ready for more data.

    The transport is ready when its write buffer is nearly empty, at asyncio's low-water mark.
    """
    headers = response.raw_headers
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # The transport buffers a body of any size. Sending the next ASGI message waits until the buffer
    # is nearly empty.
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def value_from_message(message: Message) -> dict[str, Any]:
    """Convert a protobuf message to a JSON object with the field names of the .proto file.

    64-bit integers are numbers, as Triton's clients expect; in protobuf's own JSON, they are
    strings. Fields with default values are included. Message fields, optional fields and members of
    a oneof are omitted if they are not set.
    """
    value: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        content = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            entry = kind.fields_by_name["value"]
            value[field.name] = {key: _json_value(entry, content[key]) for key in content}
        elif field.is_repeated:
            value[field.name] = [_json_value(field, element) for element in content]
        else:
            value[field.name] = _json_value(field, content)
    return value


def _json_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return value_from_message(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value

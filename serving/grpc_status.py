"""gRPC status codes of exceptions, the protocol `CallContext`, and helpers for gRPC servers."""

import functools
import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from itertools import accumulate
from typing import Any, NoReturn, Protocol, TypeVar

import grpc

from .errors import (
    BackendDownError,
    ExpiredError,
    ForbiddenError,
    InvalidRequestError,
    ModelNotFoundError,
    PrecisionNotFoundError,
    QueueFullError,
    ReloadError,
    StoppingError,
    UnauthenticatedError,
    UnloadedError,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
_Method = Callable[[Any, Any, "CallContext"], Awaitable[Any]]

_STATUS: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    PrecisionNotFoundError: grpc.StatusCode.NOT_FOUND,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ExpiredError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ReloadError: grpc.StatusCode.FAILED_PRECONDITION,
    StoppingError: grpc.StatusCode.UNAVAILABLE,
    BackendDownError: grpc.StatusCode.UNAVAILABLE,
    UnloadedError: grpc.StatusCode.UNAVAILABLE,
}

# Interval in seconds at which a gRPC server is checked for an error that has stopped it.
_CHECK_S = 1.0

# Maximum size of a status message in percent-encoded bytes. gRPC clients accept about 8 KiB of
# metadata per call; above that they report a connection error instead of the status.
_MAX_MESSAGE_BYTES = 2048
# A character has at most four UTF-8 bytes, and gRPC encodes each byte as three (`%XX`).
_MAX_BYTES_PER_CHARACTER = 12
_ELLIPSIS = "..."


class CallContext(Protocol):
    """Context of one request: the subset of `grpc.aio.ServicerContext` that HTTP supports too.

    Implementations: gRPC's context class, `serving.rpc.front_end_link.ForwardedCall` and
    `serving.http.endpoint.HttpCall`.
    """

    def peer(self) -> str:
        """Return the client's address, such as `ipv4:127.0.0.1:50000`."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the metadata that the client sent. Names are in lower case."""

    async def read(self) -> Any:
        """Return the client's next message, serialised, or `grpc.aio.EOF` after the last one."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with an error status. Always raises an exception."""

    def code(self) -> grpc.StatusCode | None:
        """Return the status code that `abort` was called with. None: the call was not aborted."""

    def details(self) -> str:
        """Return the message that `abort` was called with. Empty: the call was not aborted."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with this context once the response is sent or the call has failed."""


class CallOutcome:
    """Base class of `ForwardedCall` and `HttpCall`. Stores a call's status and done callbacks."""

    def __init__(self) -> None:
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._callbacks: list[Callable[[Any], None]] = []

    def code(self) -> grpc.StatusCode | None:
        """Return the status code that `abort` was called with. None: the call was not aborted."""
        return self._code

    def details(self) -> str:
        """Return the message that `abort` was called with. Empty: the call was not aborted."""
        return self._details

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Register a function that `end` calls with this context as its argument."""
        self._callbacks.append(callback)

    def end(self) -> None:
        """Call the functions that were registered with `add_done_callback`. Idempotent."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


def status_from_error(error: Exception) -> grpc.StatusCode:
    """Return the gRPC status code for an exception; INTERNAL if its type has none."""
    from ..model.image_limits import ImageError  # front-end processes start faster without it

    if isinstance(error, ImageError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return next(
        (_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), grpc.StatusCode.INTERNAL
    )


def status_and_message(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC status code and message for a request that raised `error`.

    If the code is INTERNAL, log the error and return a generic message. The tracebacks of the
    error and its causes are cleared, so do not raise it again.
    """
    status, message = status_from_error(error), str(error)
    if status is grpc.StatusCode.INTERNAL:
        _log.error("request failed", exc_info=error)
        message = "internal error while processing the request; see the server's log"
    _clear_tracebacks(error)
    return status, truncate_message(message)


async def abort_on_error(response: Awaitable[T], context: CallContext) -> T:
    """Await `response` and return its value.

    If awaiting raises an exception, abort the call with the exception's gRPC status and message.
    """
    try:
        return await response
    except Exception as error:
        await context.abort(*status_and_message(error))


def aborting(method: _Method) -> _Method:
    """Decorate a servicer's method so that exceptions abort the call; see `abort_on_error`."""

    @functools.wraps(method)
    def call(self: Any, request: Any, context: CallContext) -> Awaitable[Any]:
        return abort_on_error(method(self, request, context), context)

    return call


def truncate_message(message: str) -> str:
    """Shorten a status message to 2048 bytes in gRPC's percent encoding; `...` marks the cut."""
    if _MAX_BYTES_PER_CHARACTER * len(message) <= _MAX_MESSAGE_BYTES:
        return message
    sizes = map(_encoded_size, message[: _MAX_MESSAGE_BYTES + 1])
    fitting = bisect_right(list(accumulate(sizes)), _MAX_MESSAGE_BYTES)
    if fitting == len(message):
        return message
    return message[: fitting - len(_ELLIPSIS)] + _ELLIPSIS


def _encoded_size(character: str) -> int:
    """Return the size of a character in bytes after gRPC's percent encoding."""
    if " " <= character <= "~" and character != "%":
        return 1
    return 3 * len(character.encode(errors="replace"))


def _clear_tracebacks(error: Exception) -> None:
    """Clear the tracebacks of an error, its causes and contexts, and exceptions grouped in it."""
    # gRPC keeps the error in a reference cycle until the next garbage collection. The frames of a
    # traceback would keep the request's image in memory for that long.
    pending: list[BaseException | None] = [error]
    cleared: set[int] = set()
    while pending:
        raised = pending.pop()
        if raised is None or id(raised) in cleared:
            continue
        cleared.add(id(raised))
        raised.__traceback__ = None
        pending += raised.__cause__, raised.__context__
        if isinstance(raised, BaseExceptionGroup):
            pending += raised.exceptions


def drop_client_faults() -> None:
    """Filter out gRPC's log records about disconnected clients and undecodable metadata."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_server_fault)


def _is_server_fault(record: logging.LogRecord) -> bool:
    # The message of UnicodeDecodeError would quote the metadata, which can be a token.
    client_faults = grpc.aio.InternalError, UnicodeDecodeError
    return record.exc_info is None or not isinstance(record.exc_info[1], client_faults)


async def wait_for_stop(server: grpc.aio.Server) -> None:
    """Wait until a gRPC server is stopped. If an error in gRPC has stopped it, raise the error."""
    # `wait_for_termination` returns True when its timeout passes, and raises the error only then.
    while await server.wait_for_termination(_CHECK_S):
        pass

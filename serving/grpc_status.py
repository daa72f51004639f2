"""Mapping of exceptions to gRPC status codes and messages, and of gRPC codes to HTTP codes."""

import logging
from bisect import bisect_right
from collections.abc import Awaitable
from itertools import accumulate
from typing import TypeVar

import grpc

from ..model.image_limits import ImageError
from .errors import (
    BackendDownError,
    ExpiredError,
    ForbiddenError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    ReloadError,
    StoppingError,
    UnauthenticatedError,
    UnloadedError,
)
from .grpc_calls import CallContext

_log = logging.getLogger(__name__)

T = TypeVar("T")

_STATUS: dict[type[Exception], grpc.StatusCode] = {
    ImageError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ExpiredError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ReloadError: grpc.StatusCode.FAILED_PRECONDITION,
    StoppingError: grpc.StatusCode.UNAVAILABLE,
    BackendDownError: grpc.StatusCode.UNAVAILABLE,
    UnloadedError: grpc.StatusCode.UNAVAILABLE,
}

_HTTP_STATUS: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

# Maximum size of a status message in percent-encoded bytes. gRPC clients accept about 8 KiB of
# metadata per call; above that they report a connection error instead of the status.
_MAX_MESSAGE_BYTES = 2048
# A character has at most four UTF-8 bytes, and gRPC encodes each byte as three (`%XX`).
_MAX_BYTES_PER_CHARACTER = 12
_ELLIPSIS = "..."


def status_from_error(error: Exception) -> grpc.StatusCode:
    """Return the gRPC status code for an exception; INTERNAL if its type is not in `_STATUS`."""
    return next(
        (_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), grpc.StatusCode.INTERNAL
    )


def http_status_from_status(status: grpc.StatusCode) -> int:
    """Return the HTTP status code for a gRPC status code; 500 for codes without a counterpart."""
    return _HTTP_STATUS.get(status, 500)


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

"""The gRPC status that an error is answered with."""

from bisect import bisect_right
from itertools import accumulate

import grpc

from ..model.images import ImageError
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

_MESSAGE_BYTES = 2048
"""Of a status' message as it is sent. Clients take some 8 KiB of metadata, and what has more they
take for a fault of the connection."""
_MOST_BYTES_A_CHARACTER = 12
"""Of those: four, each escaped."""
_ELLIPSIS = "..."


def shortened(message: str) -> str:
    """The message of a status, cut where it is longer than clients take, as what quotes them is."""
    if _MOST_BYTES_A_CHARACTER * len(message) <= _MESSAGE_BYTES:
        return message
    sizes = map(_sent_bytes, message[: _MESSAGE_BYTES + 1])
    fitting = bisect_right(list(accumulate(sizes)), _MESSAGE_BYTES)
    if fitting == len(message):
        return message
    return message[: fitting - len(_ELLIPSIS)] + _ELLIPSIS


def _sent_bytes(character: str) -> int:
    """What a character takes in a status, where gRPC escapes what is not plain by three a byte."""
    if " " <= character <= "~" and character != "%":
        return 1
    return 3 * len(character.encode(errors="replace"))


def status_from_error(error: Exception) -> grpc.StatusCode:
    """The status that answers a request; INTERNAL for whatever is no fault of the client's."""
    return next(
        (_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), grpc.StatusCode.INTERNAL
    )

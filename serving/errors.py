"""What can go wrong in serving, and the gRPC status that says so.

    ServingError
    ├── BackendError              nothing here computes the bundle, or it failed to
    │   └── BackendDownError      what computes broke, and is being loaded again
    ├── UnloadedError             the model was unloaded, and is not loaded again yet
    ├── InvalidRequestError       an option that is out of range or not served
    ├── UnauthenticatedError      a call without a token that the server knows
    ├── ForbiddenError            a call that this client may not make
    ├── ModelNotFoundError        a model of a name or version that is not served
    ├── QueueFullError            more requests than the server has places for
    ├── ExpiredError              a request took longer than it may
    ├── ReloadError               a bundle could not take the place of the one that is served
    ├── StoppingError             the server is about to stop
    └── ClientError               raised by clients
        ├── RefusedError          the server answered with an error; `code` tells which
        ├── AccessError           the server gives this client no access
        ├── UnreachableError      no server there
        ├── DeadlineError         no answer in time
        └── ClosedError           the client itself was closed

`model.images.ImageError` and `model.manifest.BundleError` stand beside this tree.
"""

from bisect import bisect_right
from itertools import accumulate

import grpc

from ..model.images import ImageError

_MESSAGE_BYTES = 2048
"""Of a status' message as it is sent. Clients take some 8 KiB of metadata, and what has more they
take for a fault of the connection."""
_MOST_BYTES_A_CHARACTER = 12
"""Of those: four, each escaped."""
_ELLIPSIS = "..."


class ServingError(Exception):
    """Base of this tree; the message is one sentence."""


class BackendError(ServingError):
    """What was to compute the model does not fit the machine or the bundle, or failed."""


class BackendDownError(BackendError):
    """What computes the model broke, and is not there again yet."""


class UnloadedError(ServingError):
    """The model takes no requests until it is loaded again."""


class InvalidRequestError(ServingError):
    """A request asks for something that is out of range or not served."""


class UnauthenticatedError(ServingError):
    """A call needs a token, and has none that the server knows."""


class ForbiddenError(ServingError):
    """A call is for other clients."""


class ModelNotFoundError(ServingError):
    """A request names a model or a version that is not served."""


class QueueFullError(ServingError):
    """The server has no place left for a request."""


class ExpiredError(ServingError):
    """A request took longer than it or the server allows."""


class ReloadError(ServingError):
    """A bundle could not be loaded in place of the one that is served."""


class StoppingError(ServingError):
    """The server takes no requests any more."""


class ClientError(ServingError):
    """A client got no detections."""


class RefusedError(ClientError):
    """The server answered a request with an error, or would have."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class AccessError(ClientError):
    """The server gives this client no access."""


class UnreachableError(ClientError):
    """No server answers at the address."""


class DeadlineError(ClientError):
    """No answer came in time."""


class ClosedError(ClientError):
    """The client was closed before it had an answer."""


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


def image_error_from_os_error(error: OSError) -> ImageError:
    """Why an image cannot be used whose file cannot be read."""
    return ImageError(f"the file cannot be read ({error.strerror or error})")


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

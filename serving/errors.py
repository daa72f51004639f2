"""Exceptions of the server and its clients. `grpc_status` maps them to gRPC status codes.

The server also raises `ImageError` and `BundleError`. They are defined in the package `model`, and
do not derive from `ServingError`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Worker and front-end processes start faster without these imports.
    import grpc

    from ..model.image_limits import ImageError


class ServingError(Exception):
    """Base class of serving errors. The message is one sentence for the user."""


class BackendError(ServingError):
    """No backend can run the bundle on this machine, or the backend failed."""


class BackendDownError(BackendError):
    """No worker process of the model is up, or the one that computed the request has ended."""


class UnloadedError(ServingError):
    """The model is unloaded and rejects requests until it is loaded again."""


class InvalidRequestError(ServingError):
    """A field, parameter or input tensor of a request is invalid."""


class UnauthenticatedError(ServingError):
    """The method requires a bearer token, and the call has no valid one."""


class ForbiddenError(ServingError):
    """The client is not authorized to call this method."""


class ModelNotFoundError(ServingError):
    """No served model has the name and version in the request."""


class QueueFullError(ServingError):
    """The server has too many in-flight requests, open calls, or incompletely received requests."""


class RateLimitError(QueueFullError):
    """The client has sent more requests or images per second than the server allows."""


class ExpiredError(ServingError):
    """A request exceeded the client's timeout or a time limit of the server."""


class ReloadError(ServingError):
    """The bundle could not be reloaded, so the server keeps the previous model."""


class StoppingError(ServingError):
    """The server is stopping and rejects requests."""


class ClientError(ServingError):
    """Base class of the errors that this package's Python clients raise."""


class RefusedError(ClientError):
    """The server returned an error status, or the client itself rejected an invalid request.

    Attributes:
        code: gRPC status code.
    """

    def __init__(self, code: "grpc.StatusCode", message: str) -> None:
        super().__init__(message)
        self.code = code


class AccessError(ClientError):
    """The server rejected the client as unauthenticated or not authorized."""


class UnreachableError(ClientError):
    """No detection server responds at the address, or the server dropped the request."""


class DeadlineError(ClientError):
    """The response did not arrive before the client's deadline."""


class ClosedError(ClientError):
    """The client was closed before the request was sent or before its response arrived."""


def image_error_from_os_error(error: OSError) -> "ImageError":
    """Convert the OSError of an unreadable image file to an `ImageError`."""
    from ..model.image_limits import ImageError

    return ImageError(f"the file cannot be read ({error.strerror or error})")

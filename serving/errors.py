"""What can go wrong in serving.

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

`model.images.ImageError` and `model.manifest.BundleError` stand beside this tree. `statuses` says
with which status each is answered.
"""

from typing import TYPE_CHECKING

from ..model.images import ImageError

if TYPE_CHECKING:
    import grpc  # what computes needs none, and starts sooner


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

    def __init__(self, code: "grpc.StatusCode", message: str) -> None:
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


def image_error_from_os_error(error: OSError) -> ImageError:
    """Why an image cannot be used whose file cannot be read."""
    return ImageError(f"the file cannot be read ({error.strerror or error})")

"""Exceptions of the server and its clients. `grpc_status` maps them to gRPC status codes.

`DeferredErrors` delays an iterable's error until the preceding results are delivered.

The server also raises `ImageError` and `BundleError`. They are defined in the package `model`, and
do not derive from `ServingError`.
"""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    import grpc  # worker and front-end processes start faster without this import


_T = TypeVar("_T")


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


class PrecisionNotFoundError(ServingError):
    """The model is not served with the precision in the request."""


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

    def __reduce__(self) -> tuple[type[Self], tuple["grpc.StatusCode", str], dict[str, Any]]:
        """Pickle the error. An exception's default passes only the message to the constructor."""
        return type(self), (self.code, str(self)), self.__dict__


class AccessError(ClientError):
    """The server rejected the client as unauthenticated or not authorized."""


class UnreachableError(ClientError):
    """No detection server responds at the address, or the server dropped the request."""


class DeadlineError(ClientError):
    """The response did not arrive before the client's deadline."""


class ClosedError(ClientError):
    """The client was closed before the request was sent or before its response arrived."""


class DeferredErrors(Generic[_T]):
    """Wrapper of an iterable. It stores an error of the iterable and ends the iteration.

    The caller first delivers the results of the preceding items. Then it calls the method `check`,
    which raises the stored error.
    """

    # If a stream's request iterator raised an error, gRPC would drop both the error and the
    # outstanding responses.

    def __init__(self, items: Iterable[_T] | AsyncIterable[_T]) -> None:
        """Wrap an iterable. If it is sync, the wrapper supports both `for` and `async for`."""
        self._items = items
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[_T]:
        assert isinstance(self._items, Iterable)
        try:
            # Not `yield from`, which would close the caller's generator.
            for item in self._items:  # noqa: UP028
                yield item
        except Exception as error:
            self._error = error

    async def __aiter__(self) -> AsyncIterator[_T]:
        try:
            async for item in async_items(self._items):
                yield item
        except Exception as error:
            self._error = error

    def check(self, kind: type[Exception] = Exception) -> None:
        """Raise the wrapped iterable's error, if there is one and it is an instance of `kind`."""
        if isinstance(self._error, kind):
            raise self._error


async def async_items(items: Iterable[_T] | AsyncIterable[_T]) -> AsyncIterator[_T]:
    """Iterate over a sync or async iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item

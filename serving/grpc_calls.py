"""gRPC calls: interface of their context, and filter for gRPC's log records about them."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

import grpc


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
        """Call the done callbacks. Idempotent."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


def drop_client_faults() -> None:
    """Filter out gRPC's log records about disconnected clients and undecodable metadata."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_server_fault)


def _is_server_fault(record: logging.LogRecord) -> bool:
    # The message of UnicodeDecodeError would quote the metadata, which can be a token.
    client_faults = grpc.aio.InternalError, UnicodeDecodeError
    return record.exc_info is None or not isinstance(record.exc_info[1], client_faults)

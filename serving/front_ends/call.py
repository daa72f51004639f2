"""Context of a gRPC call that a front-end process received. It has gRPC's context interface."""

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc

from ..call_context import CallOutcome
from .link import Frame, Link

_log = logging.getLogger(__name__)

_Metadata = Sequence[tuple[str, str | bytes]]


class CallDetails(NamedTuple):
    """Method and metadata of a call, with the interface of `grpc.HandlerCallDetails`."""

    # Full method name, as `/package.Service/Method`.
    method: str
    # Metadata that the client sent.
    invocation_metadata: _Metadata


FindHandler = Callable[[CallDetails], Awaitable[Any]]


class ForwardedCall(CallOutcome):
    """Context of a gRPC call. Services and interceptors use it like gRPC's own context.

    A front-end process received the call. At most one message at a time is passed in each
    direction, as in gRPC's context: the front end reads a message of the client only when `read` is
    called, and `write` waits until the front end has written the message.
    """

    def __init__(self, link: Link, number: int, opening: bytes) -> None:
        """Create the context.

        Args:
            link: Socket connection to the front-end process that received the call.
            number: Number that identifies the call in the frames of `link`.
            opening: Payload of the OPEN frame: pickled method, peer and metadata.
        """
        super().__init__()
        method, peer, metadata = pickle.loads(opening)
        self._peer: str = peer
        self._details_of_call = CallDetails(method, metadata)
        self._link = link
        self._number = number
        self._serialize: Callable[[Any], bytes] | None = None
        self._trailing_metadata: _Metadata = ()
        # Futures of the pending `read` and `write`. None: no such call is pending.
        self._reading: asyncio.Future[Any] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._is_status_sent = False
        # Whether the front end has ended the call.
        self._is_closed = False
        # Task that handles the call; see `start`.
        self.task: asyncio.Task[None]

    def start(self, find_handler: FindHandler) -> None:
        """Create the task that handles the call.

        Args:
            find_handler: Function that returns the method's handler, wrapped by the interceptors,
                or None if the method is unknown.
        """
        self.task = asyncio.get_running_loop().create_task(self._handle(find_handler))
        self.task.add_done_callback(self._end_if_closed)

    def receive(self, message: Any) -> None:
        """Make the pending `read` return `message`: bytes from the client, or `grpc.aio.EOF`."""
        # A cancelled `read` loses its message, as in gRPC.
        if self._reading and not self._reading.done():
            self._reading.set_result(message)

    def confirm_write(self) -> None:
        """Make the pending `write` return, because the front end has written the message."""
        if self._writing and not self._writing.done():
            self._writing.set_result(None)

    def close(self) -> None:
        """Cancel the task that handles the call, unless the task has sent the status. Idempotent.

        This method is called if the front end reports that the gRPC call has ended, or if the
        front-end process has ended.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self.task.done():
            self.end()
        elif not self._is_status_sent:
            self.task.cancel()

    def peer(self) -> str:
        """Return the client's address."""
        return self._peer

    def invocation_metadata(self) -> _Metadata:
        """Return the metadata that the client sent."""
        return self._details_of_call.invocation_metadata

    def set_trailing_metadata(self, metadata: _Metadata) -> None:
        """Set the metadata that is sent with the status."""
        self._trailing_metadata = metadata

    async def read(self) -> Any:
        """Return the client's next message as serialised bytes, or `grpc.aio.EOF`."""
        self._reading = asyncio.get_running_loop().create_future()
        self._link.send(Frame.READ, self._number)
        try:
            return await self._reading
        finally:
            self._reading = None  # it holds the message, which can be large

    async def write(self, message: Any) -> None:
        """Send a message to the client, and wait until the front end has written it."""
        if self._is_status_sent:
            raise grpc.aio.AbortError("the call has ended")
        self._writing = asyncio.get_running_loop().create_future()
        self._send_message(Frame.MESSAGE, message)
        await self._writing

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with an error status.

        Raises:
            grpc.aio.AbortError: always.
        """
        self._code, self._details = code, details
        self._send_status(code, details)
        raise grpc.aio.AbortError(details)

    def _end_if_closed(self, _: object = None) -> None:
        if self._is_closed:
            self.end()

    async def _handle(self, find_handler: FindHandler) -> None:
        try:
            await self._run(await find_handler(self._details_of_call))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._send_status(grpc.StatusCode.CANCELLED, "")
            raise
        except Exception as error:
            _log.exception("gRPC method %s failed", self._details_of_call.method)
            self._send_status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")

    async def _run(self, handler: Any) -> None:
        if handler is None:
            self._send_status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        self._serialize = handler.response_serializer
        # The access interceptor registers all methods as request-streaming.
        if handler.response_streaming:
            await handler.stream_stream(None, self)
        else:
            self._send_message(Frame.RESPONSE, await handler.stream_unary(None, self))
        self._send_status(grpc.StatusCode.OK, "")

    def _send_message(self, kind: Frame, message: Any) -> None:
        data = self._serialize(message) if self._serialize else message
        self._link.send(kind, self._number, data)

    def _send_status(self, code: grpc.StatusCode, details: str) -> None:
        if not self._is_status_sent:
            self._is_status_sent = True
            status = code.value[0], details, self._trailing_metadata
            self._link.send(Frame.STATUS, self._number, pickle.dumps(status))

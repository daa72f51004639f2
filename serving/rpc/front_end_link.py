"""Forwarding of gRPC calls from front-end processes to the server's process.

A front-end process accepts connections, and exchanges frames with the server's process. A frame is
a header (payload size, kind, call number) and a payload. Request and response messages are passed
on without being parsed.
"""

import asyncio
import logging
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, NoReturn, Self

import grpc

from ..grpc_status import CallOutcome

# Initial size of the receive buffer in bytes. A larger frame enlarges the buffer until the frame
# has been read.
_BUFFER_BYTES: Final = 256 << 10
# Size of the socket's send buffer in bytes. The kernel may grant less.
_SOCKET_BYTES: Final = 4 << 20

# Header of a frame: size of the payload in bytes, kind, call number.
_HEADER: Final = struct.Struct("<QBQ")

_log = logging.getLogger(__name__)

_Metadata = Sequence[tuple[str, str | bytes]]


class Frame(IntEnum):
    """Kinds of frames (messages) between a front-end process and the server's process.

    The comment above each kind states the sender (`Front end` or `Server`, the two processes), the
    meaning of the frame, and its pickled payload, if any.
    """

    # Front end: the process now accepts connections.
    READY = 1
    # Front end: a client opened a call; pickled method, peer and metadata.
    OPEN = 2
    # Server: send the next message of the client.
    READ = 3
    # Front end: the next message of the client. Server: a message of a stream to the client.
    MESSAGE = 4
    # Front end: the client sends no more messages.
    END = 5
    # Front end: the latest message of the stream has been written.
    WRITTEN = 6
    # Server: the only response message of a unary call. No WRITTEN is sent in reply.
    RESPONSE = 7
    # Server: end the call; pickled status code, details and trailing metadata.
    STATUS = 8
    # Front end: the call has ended, or the client cancelled it or disconnected.
    CLOSED = 9
    # Server: stop accepting, and end when all calls have ended; pickled time limit in seconds.
    STOP = 10
    # Server: certificate files that new connections use; pickled `CertificateFiles`.
    CERTIFICATE = 11


class Link(asyncio.BufferedProtocol):
    """One end of the Unix socket between a front-end process and the server's process.

    The two processes exchange frames: messages with a kind, a call number and a payload. The link
    sends frames, and calls a function for each frame that it receives.
    """

    def __init__(self, receive: Callable[[int, int, bytes], None]) -> None:
        """Create a link that has no socket yet. Callers use the class method `connect` instead.

        Args:
            receive: Function that is called with kind, call number and payload of each received
                frame.
        """
        self._receive = receive
        self._transport: asyncio.Transport
        # Headers and payloads to send at the end of the event loop's iteration.
        self._outgoing: list[bytes] = []
        # Receive buffer. The bytes from `_start` to `_end` are received, but not processed yet.
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._loop = asyncio.get_running_loop()
        # Completes when either end is closed.
        self.closed: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def connect(
        cls, connection: socket.socket, receive: Callable[[int, int, bytes], None]
    ) -> Self:
        """Return a new `Link` that uses a connected Unix socket.

        Args:
            connection: The socket. The link takes ownership and closes it.
            receive: Function that is called with kind, call number and payload of each received
                frame.
        """
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(receive), sock=connection)
        return link

    def send(self, kind: Frame, call: int = 0, payload: bytes = b"") -> None:
        """Send a frame. If the socket is closed, the frame is dropped.

        `call` is the number of the call, or 0 in frames that concern no call.
        """
        # All frames of an iteration of the event loop are written at once, in one system call.
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(_HEADER.pack(len(payload), kind, call))
        if payload:
            self._outgoing.append(payload)

    def close(self) -> None:
        """Send the remaining frames, then close the socket."""
        self._flush()
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. Called by asyncio when the link is connected to its socket."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the free part of the receive buffer. Called by asyncio before it receives data."""
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Call the constructor's `receive` for each complete frame in the receive buffer.

        Called by asyncio after it has received data.
        """
        self._end += nbytes
        needed = _HEADER.size
        while self._end - self._start >= _HEADER.size:
            size, kind, call = _HEADER.unpack_from(self._buffer, self._start)
            needed = _HEADER.size + size
            if self._end - self._start < needed:
                break
            payload = bytes(self._buffer[self._start + _HEADER.size : self._start + needed])
            self._start += needed
            needed = _HEADER.size
            self._receive(kind, call, payload)
        self._make_room(needed)

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete the future `closed`. Called by asyncio when one end of the socket closes."""
        if not self.closed.done():  # cancelling a task that awaits `closed` cancels `closed`
            self.closed.set_result(None)

    def _flush(self) -> None:
        if self._outgoing and not self._transport.is_closing():
            self._transport.writelines(self._outgoing)
        self._outgoing = []

    def _make_room(self, needed: int) -> None:
        """Move an incomplete frame to the start of the receive buffer. Resize the buffer if needed.

        `needed` is the size in bytes of the complete frame, which the buffer must hold.
        """
        size, rest = max(_BUFFER_BYTES, needed), self._buffer[self._start : self._end]
        if len(self._buffer) != size:
            self._buffer = memoryview(bytearray(size))
        elif rest and self._start + needed <= size:
            return
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


class CallDetails(NamedTuple):
    """Method and metadata of a call, with the interface of `grpc.HandlerCallDetails`."""

    # Full method name, as `/package.Service/Method`.
    method: str
    # Metadata that the client sent.
    invocation_metadata: _Metadata


FindHandler = Callable[[CallDetails], Awaitable[Any]]


class ForwardedCall(CallOutcome):
    """Context of a client's gRPC call that a front-end process accepted and forwards.

    It has the interface of gRPC's own context. In each direction, at most one message is in transit
    at a time: the front-end process reads a message of the client only when `read` is called, and
    `write` waits until the front-end process has written the message.
    """

    def __init__(self, link: Link, number: int, opening: bytes) -> None:
        """Create the context of a call that a front-end process received.

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
        # Futures of the pending `read` and the pending `write`. None: none is pending.
        self._reading: asyncio.Future[Any] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._is_status_sent = False
        # Whether the gRPC call or the front-end process has ended; see `close`.
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
        """Complete the pending `read` with `message`: bytes from the client, or `grpc.aio.EOF`."""
        # A cancelled `read` loses its message, as in gRPC.
        if self._reading and not self._reading.done():
            self._reading.set_result(message)

    def confirm_write(self) -> None:
        """Complete the pending `write`, because the front-end process has written its message."""
        if self._writing and not self._writing.done():
            self._writing.set_result(None)

    def close(self) -> None:
        """Cancel the task that handles the call, unless the task has sent the status. Idempotent.

        This method is called if the front-end process reports that the gRPC call has ended, or if
        the front-end process itself has ended.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self.task.done():
            self.end()
        elif not self._is_status_sent:
            self.task.cancel()
            for pending in (self._reading, self._writing):
                if pending is not None:
                    pending.cancel()

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
        """Return the client's next message as serialised bytes, or `grpc.aio.EOF`.

        Raises:
            grpc.aio.AbortError: the call has ended.
        """
        self._check_open()
        self._reading = asyncio.get_running_loop().create_future()
        self._link.send(Frame.READ, self._number)
        try:
            return await self._reading
        finally:
            self._reading = None  # it holds the message, which can be large

    async def write(self, message: Any) -> None:
        """Send a message to the client. Wait until the front-end process has written it.

        Raises:
            grpc.aio.AbortError: the call has ended.
        """
        self._check_open()
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

    def _check_open(self) -> None:
        # The front-end process answers no frame of a call that has ended.
        if self._is_status_sent or self._is_closed:
            raise grpc.aio.AbortError("the call has ended")

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

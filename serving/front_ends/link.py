"""Link between the server's process and a front-end process: frames over a Unix socket.

A frame is a header (payload size, kind, call number) and a payload. Request and response messages
are passed on without being parsed.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, Self

# Initial size of the receive buffer in bytes. A larger frame enlarges it until it has been read.
_BUFFER_BYTES: Final = 256 << 10
# Size of the socket's send buffer in bytes. The kernel may grant less.
_SOCKET_BYTES: Final = 4 << 20

# Size of the payload, kind, call number.
_HEADER: Final = struct.Struct("<QBQ")


class Frame(IntEnum):
    """Kinds of frames between a front end and the server's process, in either direction."""

    # Front end: it accepts connections.
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
    # Server: the only message to the client. The front end does not reply with WRITTEN.
    RESPONSE = 7
    # Server: end the call; pickled status code, details and trailing metadata.
    STATUS = 8
    # Front end: the call has ended, or the client cancelled it or disconnected.
    CLOSED = 9
    # Server: stop accepting, and end when all calls have ended; pickled time limit in seconds.
    STOP = 10


class Link(asyncio.BufferedProtocol):
    """One end of the Unix socket between a front end and the server's process.

    It sends frames, and calls a function for each received frame.
    """

    def __init__(self, receive: Callable[[int, int, bytes], None]) -> None:
        """Create an end that has no socket yet. Callers use the class method `connect` instead.

        Args:
            receive: Function that is called with kind, call number and payload of each received
                frame.
        """
        self._receive = receive
        self._transport: asyncio.Transport
        # Parts of frames that are sent at the end of the event loop's iteration.
        self._outgoing: list[bytes] = []
        # Received bytes are those of `_buffer` from `_start` to `_end`.
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
        """Complete the future `closed`. Called by asyncio when either end is closed."""
        if not self.closed.done():  # it is done if a task that awaited it was cancelled
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

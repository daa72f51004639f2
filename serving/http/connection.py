"""HTTP connections: size limits, request pipelining, and time limits for slow clients.

The head of a request is its request line and its headers.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

import httptools
import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..config import ServeConfig

# Seconds that a client has to acknowledge sent data, and to read more of a pending response.
_STALL_S: Final = 20.0
# If the response is sent before all of the request has arrived, its rest is read and dropped for
# this many seconds. Otherwise, the client would get a TCP reset instead of the response.
_LINGER_S: Final = 2.0
# Maximum size of a request's head in bytes. The bytes that arrive together with the head's first
# byte do not count. Also the maximum size of the chunk extensions or trailers between two parts of
# a body, or after its last part.
_MAX_HEAD: Final = 64 << 10
# The parser's error at the first bytes of an HTTP/2 connection.
_HTTP2_ERROR: Final = "Pause on PRI/Upgrade"
# Maximum number of pipelined requests of a connection. They wait until earlier ones are answered.
_MAX_PIPELINED: Final = 128


class HttpConnection(HttpToolsProtocol):
    """HTTP connection. It is closed if the client is slow."""

    def __init__(self, server: uvicorn.Server, settings: ServeConfig) -> None:
        super().__init__(server.config, server.server_state, app_state={})
        self._settings = settings
        # Size of the head that is being received. None: no head is expected.
        self._head_bytes: int | None = 0
        # Number of bytes received since the head or since the last part of the body.
        self._bytes_since_body = 0
        # Bytes that are being parsed.
        self._received = b""
        self._is_body_complete = True
        # Whether received data are ignored, because a request was rejected, and the connection only
        # waits for the responses to earlier requests.
        self._ignores_data = False
        # Request that is being answered. The base class's attribute `cycle` is the latest request
        # whose head was received. If the client pipelines requests, the two can differ.
        self._answered: RequestResponseCycle | None = None
        self._opened_at = self.loop.time()
        # Closes the connection if the next head does not arrive in time.
        self._head_timer: asyncio.TimerHandle | None = None
        # Closes the connection if its client is slow to read the response, or, after the response,
        # to send the rest of the body.
        self._slow_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer that limits the time until the head of the first request has arrived."""
        super().connection_made(transport)
        _set_socket_options(transport.get_extra_info("socket"), self._settings.keepalive_s)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that the client has gone, and cancel all timers."""
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        # A timer would keep the connection and its request in memory.
        self._unset_head_timer()
        self._unset_keepalive_if_required()
        if self._slow_timer is not None:
            self._slow_timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse received data.

        A request is rejected if its head exceeds 64 KiB, or if more than 64 KiB of chunk extensions
        or trailers arrive between two parts of its body or after the last part.
        """
        if self._ignores_data:
            return
        self._received = data
        self._bytes_since_body += len(data)
        super().data_received(data)
        if self._is_in_body() and self._bytes_since_body > _MAX_HEAD:
            self.send_400_response("The trailers or chunk extensions of the body are too large.")
        if self._head_bytes is None and self._is_idle():
            self._head_bytes = 0  # the data were empty lines, so a head is still expected
        if self._head_bytes is None or self.transport.is_closing():
            return
        self._expect_head()
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD:
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """Start to count the size of a request's head (request line and headers)."""
        super().on_message_begin()
        self._head_bytes = -len(self._received)  # `data_received` adds this length afterwards
        self._is_body_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header of the request's head. Ignore headers that follow the body (trailers)."""
        if self._head_bytes is not None:  # else it is a trailer, which nothing reads
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Pass a part of a request's body to the application."""
        super().on_body(body)
        self._bytes_since_body = 0

    def on_headers_complete(self) -> None:
        """Start the request whose head has arrived, or queue it behind unanswered requests.

        Raises:
            ValueError: an HTTP/1.1 request does not have exactly one Host header, or
                `_MAX_PIPELINED` requests of the connection wait already. The parser, which calls
                this method, reports the error.
        """
        self._head_bytes = None
        self._bytes_since_body = 0
        self._unset_head_timer()
        hosts = [name for name, _ in self.headers if name == b"host"]
        if len(hosts) != 1 and self.parser.get_http_version() == "1.1":
            # The parser calls this method, and reports the exception.
            raise ValueError("a request needs exactly one Host header")
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError(
                f"more than {_MAX_PIPELINED} requests on this connection wait for a response; read "
                "responses before sending more"
            )
        if self.parser.should_upgrade():
            return  # `_unsupported_upgrade_warning` parses the request again
        super().on_headers_complete()
        age_s, limit_s = self.loop.time() - self._opened_at, self._settings.max_connection_age_s
        if limit_s is not None and age_s > limit_s:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """Mark the body of the request as complete."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_body_complete = True

    def _unsupported_upgrade_warning(self) -> None:
        """Process a request as if it had no header Upgrade. Reject a CONNECT request.

        The base class calls this method for both kinds of request. The server speaks only HTTP/1.1.
        If a request has the header Upgrade, the parser would skip its body. Therefore, a new parser
        parses the request again, without this header.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not supported.")
            return
        _, error, _ = sys.exc_info()
        assert isinstance(error, httptools.HttpParserUpgrade)
        rest = self._received[error.args[0] :]
        kept = [pair for pair in self.headers if pair[0] not in (b"upgrade", b"http2-settings")]
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s" % (method, self.url, version)
        lines = [first, *(b"%s: %s" % pair for pair in kept)]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Prepare for the next request.

        If the body of the answered request is incomplete, limit the time until the rest arrives.
        """
        super().on_response_complete()
        if self.pipeline:  # receive nothing more until the pipelined requests are answered
            self.flow.pause_reading()
        if self.transport.is_closing():  # it closes when the rest of the response has been sent
            self._set_slow_timer(_STALL_S, self.transport.abort)
        elif self._is_in_body():
            self._set_slow_timer(_LINGER_S, self._close_incomplete, self.cycle)

    def pause_writing(self) -> None:
        """Start a timer that aborts the connection if the client stops reading the response.

        asyncio calls this method when the write buffer is full.
        """
        super().pause_writing()
        waiting = self.transport.get_write_buffer_size()
        self._set_slow_timer(_STALL_S, self._check_progress, waiting)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        self.transport.abort() if self.transport.get_write_buffer_size() else self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Reject a request that cannot be parsed, and close the connection.

        The response has status 400. Its message is the parser's error, or `msg` if there is none.
        In two cases, this response is not sent:

        - Earlier requests are unanswered: the connection is closed after their responses.
        - The invalid request was already answered, before all of its body had arrived.
        """
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # the invalid request
            assert self._answered is not None
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answered
        elif self._is_in_body() and self.cycle.response_complete:
            self.transport.close()
            return
        if isinstance(problem := sys.exception(), httptools.HttpParserError):
            # If the parser called a method of this class that failed, `__context__` is that error.
            msg = f"The HTTP request is invalid: {problem.__context__ or problem}"
            if str(problem) == _HTTP2_ERROR:
                msg = "This port accepts HTTP/1.1, not HTTP/2; gRPC clients need the gRPC port"
        self._reject("400 Bad Request", msg)

    def _reject(self, status: str, message: str) -> None:
        """Send an error response to the request that is being received, and close the connection.

        If earlier requests are unanswered, this response is not sent: the connection is closed
        after their responses.
        """
        if self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete):
            # The last of the earlier responses closes the connection.
            self.cycle.keep_alive = False
            self._head_bytes = None
            self._ignores_data = True
            self._unset_head_timer()
            return
        body = to_json({"error": message})
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)
        )
        self.transport.close()
        self._set_slow_timer(_STALL_S, self.transport.abort)

    def _is_in_body(self) -> bool:
        """Return whether the body of the latest request is still incomplete."""
        if self.cycle is None or self.cycle.scope is not self.scope:
            return False  # a new request has begun
        return not self._is_body_complete

    def _is_idle(self) -> bool:
        """Return whether no request is being received or answered."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and self._is_body_complete

    def _expect_head(self) -> None:
        if self._head_timer is None:
            timeout_s = self._settings.receive_timeout_s
            self._head_timer = self.loop.call_later(timeout_s, self._close_late)

    def _close_late(self) -> None:
        """Close the connection, because the head of the next request has not arrived in time.

        If a part of the head has arrived, first respond with status 408. If the server itself has
        paused reading, do not close the connection: restart the timer that calls this method.
        """
        self._head_timer = None
        if self.pipeline:  # the server has paused reading, so the client is not late
            self._expect_head()
        elif not self._is_body_complete:  # the request has begun
            limit_s = self._settings.receive_timeout_s
            self._reject(
                "408 Request Timeout",
                f"The head of the request did not arrive completely within {limit_s:g} s.",
            )
        else:
            self.transport.close()

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _set_slow_timer(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
        self._slow_timer = self.loop.call_later(delay_s, act, *arguments)

    def _close_incomplete(self, cycle: object) -> None:
        """Abort the connection if the rest of the body of the request `cycle` has not arrived.

        The server has responded to `cycle` before all of its body arrived.
        """
        if self.cycle is cycle and self._is_in_body():
            self.transport.abort()

    def _check_progress(self, before: int) -> None:
        """Abort the connection if the client has read nothing of the response since the last check.

        `before` is the size of the write buffer at the last check, in bytes.
        """
        if not self.flow.write_paused or self.transport.is_closing():
            return
        waiting = self.transport.get_write_buffer_size()
        if waiting >= before:
            self.transport.abort()
        else:
            self._set_slow_timer(_STALL_S, self._check_progress, waiting)


def _set_socket_options(connection: socket.socket, keepalive_s: float) -> None:
    """Make a socket send without delay, and let the kernel close it if the client is unreachable.

    `keepalive_s` is the idle time in seconds before the first TCP keepalive probe.
    """
    tcp = socket.IPPROTO_TCP
    # asyncio sets TCP_NODELAY only on sockets that were created for IPPROTO_TCP. Without it, the
    # kernel sends the body of a response only after the client has acknowledged the head. Clients
    # delay the acknowledgement by 40 ms.
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, min(32_767, max(1, round(keepalive_s))))
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, round(1000 * _STALL_S))

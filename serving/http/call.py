"""Context of one HTTP request, with the interface of gRPC's context."""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ..config import address_of
from ..grpc_calls import CallOutcome


class AbortedCallError(Exception):
    """Error that ends an aborted request. The `HttpCall` holds the gRPC status and the message."""


class HttpCall(CallOutcome):
    """Context of an HTTP request. Services and access control use it like gRPC's own context.

    Call `end` after the response has been sent or the client has disconnected.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_bytes: int) -> None:
        """Create the context of an ASGI request.

        Args:
            scope: Scope of the request.
            receive: ASGI function that returns the next message of the client.
            send: ASGI function that sends a message to the client.
            max_bytes: Maximum size of the request's body in bytes.
        """
        super().__init__()
        self.request = Request(scope, receive, send)
        self._max_bytes = max_bytes
        self._body = b""
        # Whether the client has disconnected before the response was complete.
        self.is_disconnected = False

    def peer(self) -> str:
        """Return the client's address as gRPC formats it, such as `ipv4:127.0.0.1:50000`."""
        host, port = self.request.scope["client"] or ("", 0)
        with contextlib.suppress(ValueError):
            # A socket for IPv4 and IPv6 reports 127.0.0.1 as ::ffff:127.0.0.1.
            address = ipaddress.ip_address(host)
            host = str(getattr(address, "ipv4_mapped", None) or address)
        return f"{'ipv6' if ':' in host else 'ipv4'}:{address_of(host, port)}"

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return the headers of the request."""
        return self.request.headers.items()

    async def read(self) -> bytes:
        """Receive the body of the request and return it.

        Raises:
            HTTPException: the body is larger than `max_bytes`, or compressed.
            starlette.requests.ClientDisconnect: the client disconnected.
        """
        headers = self.request.headers
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "the body is compressed; send it without Content-Encoding")
        size, chunks = int(headers.get("content-length", 0)), []
        self._check_size(size)
        size = 0
        async for chunk in self.request.stream():
            size += len(chunk)
            self._check_size(size)
            chunks.append(chunk)
        return b"".join(chunks)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise HTTPException(
                413,
                f"the body is larger than {self._max_bytes} bytes; send a smaller image, or raise "
                "the server's max_message_mb",
            )

    def keep_body(self, body: bytes) -> None:
        """Store the body of the request until `take_body` is called."""
        self._body = body

    def take_body(self) -> bytes:
        """Return the body that `keep_body` stored, and drop this object's reference to it."""
        body, self._body = self._body, b""
        return body

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Store the gRPC status and its message, and raise AbortedCallError to end the request."""
        self._code, self._details = code, details
        raise AbortedCallError(details)

    @contextlib.asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """Context manager: cancel the code in the `async with` block if the client disconnects.

        Read the request's body before the block, because all messages of the client that arrive
        during the block are discarded.
        """
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._cancel_on_disconnect(task))
        try:
            yield
        finally:
            watcher.cancel()

    async def _cancel_on_disconnect(self, task: asyncio.Task[Any]) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self.is_disconnected = True
        task.cancel()

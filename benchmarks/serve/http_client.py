"""Minimal HTTP client of the load generator, with persistent connections."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpResponse(NamedTuple):
    """Status code and body of an HTTP response."""

    status: int
    body: bytes


class HttpClient:
    """HTTP client of one server, with one connection per in-flight request."""

    # A general-purpose client would take more CPU time per request than the server.

    def __init__(self, address: str) -> None:
        """Set the server's address, `host:port`, without opening a connection."""
        self._address = address
        self._host, _, self._port = address.rpartition(":")
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes) -> HttpResponse:
        """Send a POST request, and return the response.

        Raises:
            OSError, asyncio.IncompleteReadError: the connection failed.
        """
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address}\r\nContent-Length: {len(body)}"
        async with self._connection() as (reader, writer):
            writer.writelines([head.encode(), b"\r\n\r\n", body])
            response = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(response)
            content = await reader.readexactly(int(length[1]) if length else 0)
        return HttpResponse(int(response.split(maxsplit=2)[1]), content)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[_Connection]:
        """Yield an idle connection if there is one, else a new connection.

        If the `with` block raises, close the connection, else keep it for reuse.
        """
        host = self._host.strip("[]")
        connection = (
            self._idle.pop() if self._idle else await asyncio.open_connection(host, self._port)
        )
        try:
            yield connection
        except BaseException:
            connection[1].close()
            raise
        self._idle.append(connection)

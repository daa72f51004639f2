"""Server with gRPC and HTTP in the test process, and raw connections to its HTTP port."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
from in_process_server import Models, served_in_thread

# First lines of a detection request, and of one with the token `user` and a chunked body.
HEAD = b"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Authorization: Bearer user\r\nTransfer-Encoding: chunked\r\n\r\n"


class HttpAddress(NamedTuple):
    """Addresses of a running server."""

    # Address of gRPC, as `host:port`.
    grpc: str
    # Host and port of HTTP.
    http: tuple[str, int]

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.http)


def detection_request(body: bytes) -> bytes:
    """Return an HTTP detection request with the token `user` and the bytes of an image file."""
    return HEAD + b"Authorization: Bearer user\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def served_over_http(models: Models, **settings: Any) -> Iterator[HttpAddress]:
    """Serve one or more models over gRPC and HTTP from another thread."""
    port = free_port()
    with served_in_thread(models, http_port=port, **settings) as address:
        yield HttpAddress(address, ("127.0.0.1", port))


def connect(address: HttpAddress) -> socket.socket:
    return socket.create_connection(address.http, timeout=60)


def response_of(connection: socket.socket) -> bytes:
    """Return all bytes that the server sends until it closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def is_live(server: HttpAddress) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/v2/health/live").status_code == 200
    return False

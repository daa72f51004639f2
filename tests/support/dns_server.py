"""DNS server that resolves every name to the addresses given by a test."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

_HEADER = 12
_IPV4 = 1


@contextlib.contextmanager
def dns_server(addresses: Sequence[str]) -> Iterator[str]:
    """Context manager: run a DNS server, and yield its address, `host:port`.

    Args:
        addresses: IPv4 addresses that every name has. They are read at each query, so that a test
            can change them.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=_respond_to_all, args=(server, addresses))
        thread.start()
        address = server.getsockname()
        try:
            yield "{}:{}".format(*address)
        finally:
            server.sendto(b"", address)
            thread.join()


def _respond_to_all(server: socket.socket, addresses: Sequence[str]) -> None:
    while True:
        query, client = server.recvfrom(512)
        if not query:
            return
        server.sendto(_response(query, addresses), client)


def _response(query: bytes, addresses: Sequence[str]) -> bytes:
    end = query.index(b"\0", _HEADER) + 5
    (kind,) = struct.unpack("!H", query[end - 4 : end - 2])
    records = [
        b"\xc0\x0c" + struct.pack("!2HIH", _IPV4, 1, 0, 4) + socket.inet_aton(address)
        for address in (addresses if kind == _IPV4 else ())
    ]
    counts = struct.pack("!4H", 1, len(records), 0, 0)
    return query[:2] + b"\x84\0" + counts + query[_HEADER:end] + b"".join(records)

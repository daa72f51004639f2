"""Handwritten HTTP/2 frames, for clients that violate the protocol."""

import socket
from collections.abc import Mapping

from google.protobuf.message import Message

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
ACK = END_STREAM = 1
END_HEADERS = 4
# Error code of an RST_STREAM frame.
REFUSED_STREAM = 7
# SETTINGS payload with a flow-control window of 0: the server may not send data.
NO_WINDOW = b"\0\4\0\0\0\0"

DETECT = "/maskrcnn.v1.Detector/Detect"
DETECT_STREAM = "/maskrcnn.v1.Detector/DetectStream"

_FRAME_HEADER = 9
_LARGEST_FRAME = 16384


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4)
    return head + payload


def call(stream: int, method: str = DETECT, metadata: Mapping[str, bytes] | None = None) -> bytes:
    """Return the HEADERS frame that begins a gRPC call.

    The number `stream` must be odd, and greater than those used before on the connection.
    """
    fields = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": method.encode(),
        ":authority": b"localhost",
        "te": b"trailers",
        "content-type": b"application/grpc",
        **(metadata or {}),
    }
    literals = [
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value
        for name, value in fields.items()
    ]
    return frame(HEADERS, END_HEADERS, stream, b"".join(literals))


def message(stream: int, request: Message) -> bytes:
    """Return the DATA frames that contain a request message."""
    body = request.SerializeToString()
    data = b"\0" + len(body).to_bytes(4) + body
    parts = [data[at : at + _LARGEST_FRAME] for at in range(0, len(data), _LARGEST_FRAME)]
    return b"".join(frame(DATA, 0, stream, part) for part in parts)


def incomplete_message(stream: int) -> bytes:
    """Return a DATA frame with the first bytes of a request message of 1 MiB."""
    return frame(DATA, 0, stream, b"\0" + (1 << 20).to_bytes(4) + b"begun")


def connect(address: str, settings: bytes = b"") -> socket.socket:
    """Open a connection and send the client's part of the HTTP/2 handshake."""
    connection = open_socket(address)
    connection.sendall(PREFACE + frame(SETTINGS, payload=settings) + frame(SETTINGS, ACK))
    return connection


def open_socket(address: str) -> socket.socket:
    """Open a TCP connection with a timeout of 60 s."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server closes a connection before the timeout."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def frames_until(
    connection: socket.socket, kind: int, count: int = 1, payload: bytes = b""
) -> list[tuple[int, int, bytes]]:
    """Read until `count` frames have the type `kind` and a payload that begins with `payload`.

    Return type, stream and payload of all frames read, including those of other types.
    """
    frames: list[tuple[int, int, bytes]] = []
    with connection.makefile("rb") as file:
        while sum(f[0] == kind and f[2].startswith(payload) for f in frames) < count:
            head = file.read(_FRAME_HEADER)
            length, stream = int.from_bytes(head[:3]), int.from_bytes(head[5:])
            frames.append((head[3], stream, file.read(length)))
    return frames

"""HTTP connections of clients that violate the protocol, or pipeline requests."""

import random
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from gated_engine import Gate
from http_server import CHUNKED, HEAD, HttpAddress, connect, detection_request, is_live, response_of
from server_load import wait_until

Encode = Callable[..., bytes]


@pytest.mark.parametrize("pause_s", [0, 0.1])
def test_upgrades_to_other_protocols_are_ignored(
    server: HttpAddress, picture: Encode, pause_s: float
) -> None:
    """curl --http2 and Java's client offer an upgrade with each request that is not encrypted."""
    body = picture() + b"GET /v2 HTTP/1.1\r\n\r\n"  # must not be read as a request of its own
    head = HEAD + b"Authorization: Bearer user\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
    head += b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(server) as client:
        client.sendall(head + body[: 0 if pause_s else None])
        if pause_s:
            time.sleep(pause_s)
            client.sendall(body)
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 200")
    assert response.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "request_",
    [
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        CHUNKED + b"0\r\n" + 200_000 * b"a: b\r\n",
        CHUNKED + b"5;" + 1_000_000 * b"a",
    ],
    ids=["CONNECT", "no host", "two hosts", "trailers", "chunk extension"],
)
def test_requests_that_http_forbids_are_rejected(server: HttpAddress, request_: bytes) -> None:
    with connect(server) as client:
        with suppress(ConnectionError):
            client.sendall(request_)
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 400") or (len(request_) > 1000 and not response)


def test_http2_connections_are_answered_with_the_supported_version(server: HttpAddress) -> None:
    with connect(server) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 400")
    assert b"HTTP/1.1, not HTTP/2" in response


def test_responses_come_before_the_end_of_a_malformed_connection(
    server: HttpAddress, picture: Encode
) -> None:
    with connect(server) as client:
        client.sendall(detection_request(picture()) * 2 + b"garbage\r\n\r\n")
        assert response_of(client).count(b"HTTP/1.1 200") == 2


def test_pipelined_requests_are_answered_up_to_a_limit(server: HttpAddress) -> None:
    """Further ones would take memory. The connection is closed, so clients can repeat them."""
    request = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = request.replace(b"localhost", b"localhost\r\nConnection: close")
    for count, answered in ((100, range(100, 101)), (3000, range(1, 200))):
        with connect(server) as client:
            client.sendall((count - 1) * request + last)
            assert response_of(client).count(b"HTTP/1.1 200") in answered


def test_invalid_request_after_one_in_progress(
    server: HttpAddress, gate: Gate, picture: Encode
) -> None:
    """The response to the first one comes first, and ends the connection."""
    count = gate.count
    gate.close()
    with connect(server) as client:
        client.sendall(detection_request(picture()) + CHUNKED + b"no number\r\n")
        wait_until(lambda: gate.count > count)
        gate.open()
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 200")
    assert response.count(b"HTTP/1.1 ") == 1


def test_endless_heads_are_rejected(server: HttpAddress) -> None:
    with connect(server) as client:
        client.sendall(HEAD)
        with suppress(ConnectionError):
            for number in range(100):
                client.sendall(b"x-%d: " % number + bytes(8192).replace(b"\0", b"a") + b"\r\n")
                time.sleep(0.001)
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 400") or not response  # or a reset


def test_malformed_requests_get_errors(server: HttpAddress, picture: Encode) -> None:
    numbers = random.Random(0)
    head = HEAD + b"Authorization: Bearer user\r\nContent-Length: %d\r\n\r\n"
    valid = head % 600 + picture()[:600]
    for number in range(300):
        data = bytearray(valid)
        if number % 3:
            for _ in range(numbers.randint(1, 20)):
                data[numbers.randrange(len(data) if number % 2 else len(head))] = numbers.randrange(
                    256
                )
        else:
            data = bytearray(numbers.randbytes(200))
        with connect(server) as client:
            client.sendall(bytes(data))
            client.shutdown(socket.SHUT_WR)
            response = response_of(client)
        assert re.match(rb"HTTP/1.1 4\d\d|$", response), response
    wait_until(lambda: is_live(server))

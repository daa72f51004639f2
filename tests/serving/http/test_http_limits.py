"""Limits of the HTTP port: tokens, overload, slow, vanished and hostile clients, shutdown."""

import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from gated_engine import Gate, gated_engines
from http_server import HttpAddress, connect, response_of, served_over_http
from server_load import server_process, wait_until
from triton_requests import MODEL

Encode = Callable[..., bytes]
HEAD = b"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Authorization: Bearer user\r\nTransfer-Encoding: chunked\r\n\r\n"
USER, ADMIN = {"Authorization": "Bearer user"}, {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def gated(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HttpAddress, Gate]]:
    """Server with one slot, tokens and short time limits, whose engine has a gate."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "users").write_text("user")
    (folder / "admins").write_text("admin")
    with (
        gated_engines(folder) as gate,
        served_over_http(
            bundle,
            queue_size=1,
            max_batch=1,
            max_message_mb=1,
            receive_timeout_s=1,
            max_connections=8,
            token_file=folder / "users",
            admin_token_file=folder / "admins",
        ) as server,
    ):
        yield server, gate


@pytest.fixture
def server(gated: tuple[HttpAddress, Gate]) -> HttpAddress:
    return gated[0]


@pytest.fixture
def gate(gated: tuple[HttpAddress, Gate]) -> Iterator[Gate]:
    yield gated[1]
    gated[1].open()


@pytest.fixture
def http(server: HttpAddress) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_tokens(http: httpx.Client) -> None:
    unload = f"/v2/repository/models/{MODEL}x/unload"
    for path in ("/v2", "/v1/model", "/v1/samples"):
        response = http.get(path)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert http.get(path, headers=USER).status_code == 200
        assert http.get(path, headers=ADMIN).status_code == 200
    for path in ("/", "/page.js", "/openapi.json", "/v2/health/live", "/v2/health/ready"):
        assert http.get(path).status_code == 200
    assert http.post(unload).status_code == 401
    assert http.post(unload, headers=USER).status_code == 403
    assert http.post(unload, headers=ADMIN).status_code == 404


def test_overloaded_server_rejects_requests(
    http: httpx.Client, server: HttpAddress, gate: Gate, picture: Encode
) -> None:
    count = gate.count
    gate.close()
    with ThreadPoolExecutor(1) as other:
        url = f"{server.url}/v1/detect"
        first = other.submit(httpx.post, url, content=picture(), headers=USER, timeout=60)
        wait_until(lambda: gate.count > count)
        response = http.post("/v1/detect", content=picture(), headers=USER)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "slots" in response.json()["error"]
        gate.open()
        assert first.result().status_code == 200
    assert http.post("/v1/detect", content=picture(), headers=USER).status_code == 200


def test_body_of_a_response_does_not_wait_for_the_acknowledgement_of_its_head(
    server: HttpAddress,
) -> None:
    # The server runs in this process, and its end of the connection is among the open files.
    def sends_without_delay() -> bool:
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.fromfd(int(descriptor), family, kind) as accepted:
                if accepted.getpeername() == client.getsockname():
                    return accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        return False

    family, kind = socket.AF_INET, socket.SOCK_STREAM
    with connect(server) as client:
        wait_until(sends_without_delay)


@pytest.mark.parametrize("requests", [1, 3])
def test_vanished_client_frees_its_slot(
    http: httpx.Client, server: HttpAddress, gate: Gate, picture: Encode, requests: int
) -> None:
    """The client may have sent further requests before it vanished."""
    count = gate.count
    gate.close()
    with connect(server) as client:
        body = picture()
        length = b"Authorization: Bearer user\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall((HEAD + length + body) * requests)
        wait_until(lambda: gate.count > count)

    def is_admitted() -> bool:
        # A time limit of 10 ms: the request either finds no slot, or expires.
        query = "/v1/detect?timeout_us=10000"
        return http.post(query, content=picture(), headers=USER).status_code == 504

    wait_until(is_admitted)


def test_slow_bodies_and_heads(server: HttpAddress) -> None:
    with connect(server) as body, connect(server) as head, connect(server) as silent:
        body.sendall(HEAD + b"Authorization: Bearer user\r\nContent-Length: 100\r\n\r\nabc")
        head.sendall(HEAD[:-5])
        response = response_of(body)
        assert response.startswith(b"HTTP/1.1 408")
        assert b"did not arrive" in response
        assert response_of(head) == response_of(silent) == b""


def test_time_limit_of_receiving_ends_with_the_request(
    http: httpx.Client, gate: Gate, picture: Encode
) -> None:
    """The limit is 1 s. Computing may take longer, and so may the pause to the next request."""
    with ThreadPoolExecutor() as threads:
        for _ in range(2):
            gate.close()
            sent = threads.submit(http.post, "/v1/detect", content=picture(), headers=USER)
            time.sleep(1.2)
            gate.open()
            assert sent.result().status_code == 200


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


def test_responses_come_before_the_end_of_a_malformed_connection(
    server: HttpAddress, picture: Encode
) -> None:
    body = picture()
    head = HEAD + b"Authorization: Bearer user\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(server) as client:
        client.sendall((head + body) * 2 + b"garbage\r\n\r\n")
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
    body, count = picture(), gate.count
    head = HEAD + b"Authorization: Bearer user\r\nContent-Length: %d\r\n\r\n" % len(body)
    gate.close()
    with connect(server) as client:
        client.sendall(head + body + CHUNKED + b"no number\r\n")
        wait_until(lambda: gate.count > count)
        gate.open()
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 200")
    assert response.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("is_chunked", [True, False])
def test_large_bodies_are_rejected(server: HttpAddress, is_chunked: bool) -> None:
    with connect(server) as client:
        client.sendall(HEAD + b"Authorization: Bearer user\r\n")
        if is_chunked:
            client.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
            with suppress(ConnectionError):
                for _ in range(20):
                    client.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")
        else:
            client.sendall(b"Content-Length: 10000000000\r\n\r\n" + bytes(0x10000))
        assert response_of(client).startswith(b"HTTP/1.1 413")


def test_endless_heads_are_rejected(server: HttpAddress) -> None:
    with connect(server) as client:
        client.sendall(HEAD)
        with suppress(ConnectionError):
            for number in range(100):
                client.sendall(b"x-%d: " % number + bytes(8192).replace(b"\0", b"a") + b"\r\n")
                time.sleep(0.001)
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 400") or not response  # or a reset


def test_connections_beyond_the_limit_are_closed(server: HttpAddress) -> None:
    connections = [connect(server) for _ in range(12)]
    try:
        for connection in connections:
            connection.settimeout(0.5)
        states = []
        for connection in connections:
            try:
                states.append(connection.recv(1))
            except TimeoutError:
                states.append(None)
            except ConnectionError:
                states.append(b"")
        assert states.count(b"") >= 4
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: _is_live(server))


def _is_live(server: HttpAddress) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/v2/health/live").status_code == 200
    return False


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
    wait_until(lambda: _is_live(server))


@pytest.mark.slow
def test_stopping_server_completes_accepted_requests(
    bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    log = tmp_path / "log"
    with server_process(bundle, log, "--http-port", "0", "--max-wait-s", "600") as (process, _):
        (url,) = re.findall(r"HTTP at (http://\S+)/", log.read_text())
        outcomes: list[int | None] = []

        def send() -> None:
            with httpx.Client(base_url=url, timeout=60) as client:
                while outcomes.count(None) < 20:
                    try:
                        response = client.post("/v1/detect", content=picture())
                        outcomes.append(response.status_code)
                    except httpx.ConnectError:  # the port is closed
                        outcomes.append(None)
                        time.sleep(0.01)
                    except httpx.TransportError:  # an idle connection was closed
                        outcomes.append(None)

        with ThreadPoolExecutor(4) as clients:
            running = [clients.submit(send) for _ in range(4)]
            wait_until(lambda: len(outcomes) > 20)
            assert httpx.get(f"{url}/v2/health/ready").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            for client in running:
                client.result()
    assert outcomes.count(200) > 20
    assert set(outcomes) <= {200, 503, None}
    assert "Traceback" not in log.read_text()

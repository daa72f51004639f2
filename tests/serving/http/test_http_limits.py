"""Limits of the HTTP port: tokens, overload, slow and vanished clients, shutdown."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from gated_engine import Gate
from http_server import HEAD, HttpAddress, connect, detection_request, is_live, response_of
from open_files import connected_without_free_files
from server_load import server_process, wait_until
from triton_requests import MODEL

from maskrcnn_trt.serving.http import connection
from maskrcnn_trt.serving.monitoring import logs

Encode = Callable[..., bytes]
USER, ADMIN = {"Authorization": "Bearer user"}, {"Authorization": "Bearer admin"}


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


def test_lack_of_file_descriptors_is_one_warning(
    server: HttpAddress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "accept_failures", logs.AcceptFailures())
    with connected_without_free_files(*server.http):
        wait_until(lambda: "open files" in caplog.text)
    wait_until(lambda: is_live(server))
    assert caplog.text.count("Too many open files") == 1
    assert "Traceback" not in caplog.text


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
        client.sendall(detection_request(picture()) * requests)
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
        response = response_of(head)
        assert response.startswith(b"HTTP/1.1 408")
        assert b"did not arrive" in response
        assert response_of(silent) == b""


def test_idle_connection_is_closed_without_response(server: HttpAddress) -> None:
    """An empty line after a request is not a part of the next one."""
    with connect(server) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        client.sendall(b"\r\n")
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 200")
    assert response.count(b"HTTP/1.1 ") == 1


def test_response_comes_before_the_end_of_a_connection_with_a_slow_head(
    server: HttpAddress, gate: Gate, picture: Encode
) -> None:
    count = gate.count
    gate.close()
    with connect(server) as client:
        client.sendall(detection_request(picture()) + HEAD)
        wait_until(lambda: gate.count > count)
        time.sleep(1.6)  # the time limit is 1 s
        client.sendall(b"\r\n")
        gate.open()
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 200")
    assert response.count(b"HTTP/1.1 ") == 1


def test_slow_head_behind_a_complete_request(
    server: HttpAddress, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit is that of a head, not that of a body whose request was already answered."""
    monkeypatch.setattr(connection, "_LINGER_S", 0.1)
    with connect(server) as client:
        client.sendall(detection_request(picture()) + HEAD)
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in response


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
    wait_until(lambda: is_live(server))


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

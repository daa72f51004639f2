"""Misbehaving clients of the metrics endpoint, and the log messages about them."""

import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from open_files import connected_without_free_files
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from scraped_metrics import read
from server_load import wait_until

from maskrcnn_trt.serving import prometheus
from maskrcnn_trt.serving.monitoring.logs import AcceptFailures
from maskrcnn_trt.serving.prometheus import metrics_server

Connect = Callable[[], socket.socket]

_MANY = 100
# Maximum number of concurrent connections.
_SERVED = 32


class FaultyCollector(Collector):
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("no metrics today")


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("sample", "Sample.", registry=registry).set(42)
    return registry


@pytest.fixture
def url(registry: CollectorRegistry) -> Iterator[str]:
    with metrics_server(registry, "127.0.0.1", 0) as url:
        yield url


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    """Return a function that opens connections. They are closed at the end of the test."""
    address = urlsplit(url)
    with ExitStack() as connections:
        yield lambda: connections.enter_context(
            socket.create_connection((address.hostname, address.port), timeout=60)
        )


def send(connection: socket.socket, data: bytes) -> None:
    """Send data over a connection that may be closed."""
    with suppress(ConnectionError):
        connection.send(data)


def is_ended(connection: socket.socket) -> bool:
    """Read all received data. Return whether the server has closed the connection."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_slow_clients_are_disconnected_without_a_log(
    connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, slow = connect(), connect()

    def are_disconnected() -> bool:
        send(slow, b"x")
        return is_ended(silent) and is_ended(slow)

    wait_until(are_disconnected)
    assert capsys.readouterr().err == ""


def test_disconnecting_clients_are_logged_at_debug(
    url: str,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("DEBUG", "maskrcnn_trt.serving")  # other tests may have set a level
    connection = connect()
    connection.sendall(b"GET /metrics HTTP/1.0\r\nAccept:")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_until(lambda: "closed its connection" in caplog.text)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert "sample 42.0" in read(url)
    assert capsys.readouterr().err == ""


def test_oldest_connections_are_closed_at_the_limit(url: str, connect: Connect) -> None:
    connections: list[socket.socket] = []
    for _ in range(_MANY):
        connections.append(connect())
        for connection in connections:
            send(connection, b"x")
    assert "sample 42.0" in read(url)
    assert all(map(is_ended, connections[:-_SERVED]))


def test_collector_errors_are_logged(
    registry: CollectorRegistry,
    url: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry.register(FaultyCollector())
    with pytest.raises(HTTPError, match="500"), urllib.request.urlopen(url):
        pass
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "no metrics today" in record.getMessage()
    assert capsys.readouterr().err == ""


def test_silent_clients_block_neither_others_nor_the_shutdown(registry: CollectorRegistry) -> None:
    with ExitStack() as silent, metrics_server(registry, "127.0.0.1", 0) as url:
        address = urlsplit(url)
        for _ in range(5):
            silent.enter_context(socket.create_connection((address.hostname, address.port)))
        assert "sample 42.0" in read(url)


def test_lack_of_file_descriptors_is_one_warning(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prometheus, "accept_failures", AcceptFailures())
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    with connected_without_free_files(address.hostname, address.port):
        wait_until(lambda: "open files" in caplog.text)
    assert "sample 42" in read(url)
    assert caplog.text.count("Too many open files") == 1
    assert "Traceback" not in caplog.text

"""Clients of the metrics' port that break its rules, and what is said of them."""

import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from scraped_metrics import read
from server_load import wait_until

from maskrcnn_trt.serving.monitoring.prometheus import metrics_server

Connect = Callable[[], socket.socket]

_MANY = 100
_SERVED = 32
"""Connections at once, by the documentation."""


class FaultyCollector(Collector):
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("no metrics today")


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("answer", "It.", registry=registry).set(42)
    return registry


@pytest.fixture
def url(registry: CollectorRegistry) -> Iterator[str]:
    with metrics_server(registry, "127.0.0.1", 0) as url:
        yield url


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    """Opens connections, which are closed in the end."""
    address = urlsplit(url)
    with ExitStack() as connections:
        yield lambda: connections.enter_context(
            socket.create_connection((address.hostname, address.port), timeout=60)
        )


def say(connection: socket.socket, word: bytes) -> None:
    """Say a word over a connection that may have ended."""
    with suppress(ConnectionError):
        connection.send(word)


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has ended a connection; what it said before is read."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("word", [b"", b"x"])
def test_whoever_never_comes_to_an_end_is_sent_away_without_a_word(
    connect: Connect, capsys: pytest.CaptureFixture[str], word: bytes
) -> None:
    connection = connect()

    def is_sent_away() -> bool:
        say(connection, word)
        return is_ended(connection)

    wait_until(is_sent_away)
    assert capsys.readouterr().err == ""


def test_whoever_breaks_off_is_no_news(
    url: str,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("DEBUG", "maskrcnn_trt.serving")  # which other tests may have given a level
    connection = connect()
    connection.sendall(b"GET /metrics HTTP/1.0\r\nAccept:")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_until(lambda: "broke off" in caplog.text)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert "answer 42.0" in read(url)
    assert capsys.readouterr().err == ""


def test_the_oldest_of_many_connections_give_way(url: str, connect: Connect) -> None:
    connections: list[socket.socket] = []
    for _ in range(_MANY):
        connections.append(connect())
        for connection in connections:
            say(connection, b"x")
    assert "answer 42.0" in read(url)
    assert all(map(is_ended, connections[:-_SERVED]))


def test_a_fault_of_the_server_is_logged(
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

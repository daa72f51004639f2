"""Servers that are added to a DNS name while a client is connected."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dns_server import dns_server
from in_process_server import served
from stub_server import StubDetector, stub_server

from maskrcnn_trt.serving.client import DetectorClient, connection

Encode = Callable[..., bytes]

# By default gRPC resolves a name at most once in 30 s.
RESOLUTION_INTERVAL = ("grpc.dns_min_time_between_resolutions_ms", 200)


async def test_clients_use_servers_added_later(
    bundle: Path, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    default_options = connection.channel_options

    def options(*numbers: Any) -> list[tuple[str, Any]]:
        return [*default_options(*numbers), RESOLUTION_INTERVAL]

    monkeypatch.setattr(connection, "channel_options", options)
    addresses = ["127.0.0.1"]
    late = StubDetector()

    def detect(resolver: str, port: str) -> None:
        with DetectorClient(f"dns://{resolver}/detector.test:{port}") as client:
            client.detect(picture())
            with stub_server(late, address=f"127.0.0.2:{port}"):
                addresses.append("127.0.0.2")
                until = time.monotonic() + 60
                while not late.calls and time.monotonic() < until:
                    client.detect(picture())

    async with served(bundle, max_connection_age_s=0.5, stop_grace_s=5) as first:
        with dns_server(addresses) as resolver:
            await asyncio.to_thread(detect, resolver, first.rpartition(":")[2])
    assert late.calls

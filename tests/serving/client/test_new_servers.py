"""Servers that a name gains while clients are connected."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limited_server import served
from name_server import named
from stub_server import Detector, serving

from maskrcnn_trt.serving.client import DetectorClient, connection

Encode = Callable[..., bytes]

ASKS_AGAIN = ("grpc.dns_min_time_between_resolutions_ms", 200)
"""gRPC itself asks for a name every 30 s at most."""


def test_clients_find_servers_that_come_later(
    bundle: Path, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_options = connection.channel_options

    def options(*numbers: Any) -> list[tuple[str, Any]]:
        return [*own_options(*numbers), ASKS_AGAIN]

    monkeypatch.setattr(connection, "channel_options", options)
    addresses = ["127.0.0.1"]
    late = Detector()

    def ask(name_server: str, port: str) -> None:
        with DetectorClient(f"dns://{name_server}/detector.test:{port}") as client:
            client.detect(picture())
            with serving(late, address=f"127.0.0.2:{port}"):
                addresses.append("127.0.0.2")
                until = time.monotonic() + 60
                while not late.calls and time.monotonic() < until:
                    client.detect(picture())

    async def run() -> None:
        async with served(bundle, max_connection_age_s=0.5, stop_grace_s=5) as first:
            with named(addresses) as name_server:
                await asyncio.to_thread(ask, name_server, first.rpartition(":")[2])

    asyncio.run(run())
    assert late.calls

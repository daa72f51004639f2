"""Fixtures: a server with one admission slot, bearer tokens and short time limits."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gated_engine import Gate, gated_engines
from http_server import HttpAddress, served_over_http


@pytest.fixture(scope="module")
def gated(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HttpAddress, Gate]]:
    """Server with one admission slot, tokens and short time limits, and the gate of its engine."""
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

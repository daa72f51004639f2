"""Validation of server addresses."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from maskrcnn_trt.benchmarks.serve import serve
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.commands.client import client

INVALID = [
    "localhost",
    "localhost:",
    "localhost:0",
    "localhost:99999",
    "localhost:port",
    "localhost:8500/",
    " localhost:8500",
    "local host:8500",
    ":8500",
    "8500",
    "",
    "::1:8500",
    "[::1]",
    "[nowhere]:8500",
    "http://localhost:8500",
    "grpc://localhost:8500",
    "dns",
    "unix:",
]
VALID = [
    "localhost:8500",
    "127.0.0.1:1",
    "detector_1.example.org:65535",
    "[::1]:8500",
    "[fe80::1%eth0]:8500",
    "dns:localhost:8500",
    "dns:///localhost:8500",
    "dns://127.0.0.1/localhost:8500",
    "ipv4:127.0.0.1:8500,127.0.0.1:8501",
    "ipv6:[::1]:8500",
    "unix:run/detector.sock",
    "unix:///run/detector.sock",
    "unix-abstract:detector",
    "vsock:2:8500",
    "xds:///detector",
]


async def create_async(address: str) -> None:
    await AsyncDetectorClient(address).close()


@pytest.mark.parametrize("address", INVALID)
def test_invalid_addresses_raise(address: str) -> None:
    with pytest.raises(ValueError, match=r"not a server address; .* as in localhost:8500") as no:
        DetectorClient(address)
    assert str(no.value).startswith(repr(address))
    assert ("leave out http://" in str(no.value)) == address.startswith("http:")
    with pytest.raises(ValueError, match="not a server address"):
        asyncio.run(create_async(address))


@pytest.mark.parametrize("address", VALID)
def test_valid_addresses(address: str) -> None:
    DetectorClient(address).close()
    asyncio.run(create_async(address))


def test_commands_reject_invalid_addresses(tmp_path: Path) -> None:
    image = tmp_path / "a.jpg"
    image.write_bytes(b"x")
    for command, words in ((client, [str(image)]), (serve, [])):
        result = CliRunner().invoke(command, ["http://localhost:8500", *words])
        assert result.exit_code == 2
        assert "'http://localhost:8500' is not a server address" in result.stderr
        assert "leave out http://" in " ".join(result.stderr.split())

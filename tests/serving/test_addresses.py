"""What is taken for the address of a server."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from maskrcnn_trt.benchmarks.serve_commands import serve
from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.client_command import client

WRONG = [
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
RIGHT = [
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


async def prepare_async(address: str) -> None:
    await AsyncDetectorClient(address).close()


@pytest.mark.parametrize("address", WRONG)
def test_what_is_no_address_is_refused_before_anybody_is_asked(address: str) -> None:
    with pytest.raises(ValueError, match=r"no address of a server; .* as in localhost:8500") as no:
        DetectorClient(address)
    assert str(no.value).startswith(repr(address))
    assert ("leave out http://" in str(no.value)) == address.startswith("http:")
    with pytest.raises(ValueError, match="no address of a server"):
        asyncio.run(prepare_async(address))


@pytest.mark.parametrize("address", RIGHT)
def test_what_may_be_an_address_is_taken(address: str) -> None:
    DetectorClient(address).close()
    asyncio.run(prepare_async(address))


def test_commands_say_so_before_they_begin(tmp_path: Path) -> None:
    image = tmp_path / "a.jpg"
    image.write_bytes(b"x")
    for command, words in ((client, [str(image)]), (serve, [])):
        result = CliRunner().invoke(command, ["http://localhost:8500", *words])
        assert result.exit_code == 2
        assert "'http://localhost:8500' is no address of a server" in result.stderr
        assert "leave out http://" in " ".join(result.stderr.split())

"""Validation of server addresses."""

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


@pytest.mark.parametrize("address", INVALID)
def test_invalid_addresses_raise(address: str) -> None:
    for kind in (DetectorClient, AsyncDetectorClient):
        with pytest.raises(ValueError, match=r"not a server address; .* as in localhost:8500") as e:
            kind(address)
        assert str(e.value).startswith(repr(address))
        assert ("leave out http://" in str(e.value)) == address.startswith("http:")


@pytest.mark.parametrize("address", VALID)
async def test_valid_addresses(address: str) -> None:
    DetectorClient(address).close()
    await AsyncDetectorClient(address).close()


def test_commands_reject_invalid_addresses(tmp_path: Path) -> None:
    image = tmp_path / "a.jpg"
    image.write_bytes(b"x")
    for command, words in ((client, [str(image)]), (serve, [])):
        result = CliRunner().invoke(command, ["http://localhost:8500", *words])
        assert result.exit_code == 2
        assert "'http://localhost:8500' is not a server address" in result.stderr
        assert "leave out http://" in " ".join(result.stderr.split())

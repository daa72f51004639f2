"""Serving benchmarks against a real server of the tiny bundle."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from maskrcnn_trt.benchmarks.commands import bench
from maskrcnn_trt.benchmarks.serve import NoAnswerError, ServeSettings, measure_server
from maskrcnn_trt.benchmarks.server_process import ServerStartError, running_server
from maskrcnn_trt.serving.errors import RefusedError, UnreachableError


@pytest.fixture(scope="module")
def server(bundle: Path):
    with running_server(bundle) as address:
        yield address


def test_server_of_a_bundle_is_measured_and_stopped(bundle: Path, tmp_path: Path):
    record = tmp_path / "record.json"
    options = ("--concurrency", "1", "--concurrency", "6", "--seconds", "1", "--warmup", "0.2")
    result = CliRunner().invoke(bench, ["serve", str(bundle), *options, "--json", str(record)])
    assert result.exit_code == 0, result.output
    one, six = json.loads(record.read_text())["results"]
    assert (one["concurrency"], six["concurrency"]) == (1, 6)
    assert one["mean_batch_size"] == 1
    assert 1 < six["mean_batch_size"] <= 6
    for found in (one, six):
        assert found["requests"] == found["images_per_second"] * 1.0
        assert all(milliseconds >= 0 for milliseconds in found["stages"].values())
        assert sum(found["stages"].values()) <= found["latency"]["mean"]


def test_refused_image_ends_the_measurement(server: str):
    settings = ServeSettings(concurrencies=(2,), images=[b"no image"], seconds=0.5)
    with pytest.raises(RefusedError, match="JPEG, PNG or WebP"):
        measure_server(server, settings)


def test_too_short_a_time_is_an_error(server: str):
    settings = ServeSettings(concurrencies=(1,), seconds=1e-9, warmup_seconds=0)
    with pytest.raises(NoAnswerError, match="measure longer with --seconds"):
        measure_server(server, settings)


def test_absent_server_is_an_error():
    with pytest.raises(UnreachableError):
        measure_server("127.0.0.1:1", ServeSettings(concurrencies=(1,), seconds=0.1))


def test_server_that_does_not_start_is_an_error(tmp_path: Path):
    with pytest.raises(ServerStartError, match="did not start"), running_server(tmp_path):
        pass

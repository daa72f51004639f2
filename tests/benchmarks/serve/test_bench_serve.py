"""`bench serve` with a real server of the tiny bundle."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from command_line import invoke

from maskrcnn_trt.benchmarks.serve import serve
from maskrcnn_trt.benchmarks.serve.load import ClosedLoop, OpenLoop
from maskrcnn_trt.benchmarks.serve.measure import (
    ServerProcess,
    ServerStartError,
    ServeSettings,
    measure_server,
    running_server,
)
from maskrcnn_trt.benchmarks.serve.results import NoAnswerError, ServeResult
from maskrcnn_trt.serving.errors import RefusedError, UnreachableError

run = partial(invoke, serve)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[ServerProcess]:
    """A server with a short queue."""
    with running_server(bundle, "--queue-size", "6", "--max-batch", "4") as server:
        yield server


@pytest.mark.slow
def test_server_of_a_bundle_is_measured_and_stopped(bundle: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    levels = ("--concurrency", 1, "--http", 6, "--streamed", 6, "--load", 0.5)
    levels += ("--processes", 2)
    times = ("--seconds", 1, "--warmup", 0.1)
    extras = ("--engine-rate", "--peer", "unbatched", "--json", record, "--output", tmp_path)
    result = run(bundle, *levels, *times, *extras, "--", "--max-batch", 3, "--threads", 1)
    assert result.exit_code == 0, result.output
    report = json.loads(record.read_text())
    one, six, http, streamed, half, *unbatched = report["results"]
    one_unbatched, six_unbatched, _ = unbatched
    assert [r["max_batch"] for r in report["results"]] == [3, 3, 3, 3, 3, 1, 1, 1]
    assert one["load"] == {"clients": 1, "streamed": False}
    assert six["load"] == {"clients": 6, "streamed": False}
    assert http["load"] == {"clients": 6, "streamed": False, "path": "/v1/detect?mask_format=rle"}
    assert streamed["load"] == {"clients": 6, "streamed": True}
    best = max(one["images_per_second"], six["images_per_second"])
    assert half["load"] == {"rate": best / 2, "arrivals": "poisson"}
    assert one["mean_batch_size"] == one_unbatched["mean_batch_size"] == 1
    assert six_unbatched["mean_batch_size"] == 1
    assert 1 < six["mean_batch_size"] <= 3
    assert 1 < streamed["mean_batch_size"] <= 3
    for measured in report["results"]:
        assert not measured["failures"]
        assert measured["offered_per_second"] == measured["requests"]  # in one second
        assert sum(measured["times"].values()) == pytest.approx(measured["latency"]["mean"])
        assert min(measured["times"].values()) >= 0
        assert measured["server"]["cores"] > 0
        assert all(20 < mib < 4000 for mib in measured["server"]["memory_mib"])
    assert report["bulk"]["batch"] == 3
    assert report["max_delay_ms"] == 2.0
    (page,) = tmp_path.glob("serve-*.md")
    assert "images/s of the model alone, without a server" in page.read_text()
    assert "of gRPC's" in page.read_text()


def failed(result: ServeResult) -> dict[str, int]:
    return {failures.status: failures.requests for failures in result.failures}


@pytest.mark.slow
def test_rejected_requests_are_counted_separately(server: ServerProcess) -> None:
    settings = ServeSettings(
        concurrencies=(12,),
        streamed=(12,),
        rates=(200,),  # with more, gRPC itself might reject some on a slow machine
        arrivals="constant",
        seconds=1,
        warmup_seconds=0.5,
    )
    closed, streamed, opened = measure_server(server.address, settings, server.pid)
    assert (closed.load, opened.load) == (ClosedLoop(12), OpenLoop(200, "constant"))
    assert failed(closed).keys() == failed(opened).keys() == {"RESOURCE_EXHAUSTED"}
    assert not failed(streamed)  # requests on a stream wait
    assert streamed.requests
    assert failed(opened)["RESOURCE_EXHAUSTED"] + opened.requests == 200
    assert opened.offered_per_second == 200


@pytest.mark.parametrize(
    ("error", "fact", "settings"),
    [
        # Late responses count as failed.
        (
            NoAnswerError,
            "DEADLINE_EXCEEDED",
            {"concurrencies": (), "rates": (100,), "timeout_s": 1e-4},
        ),
        (RefusedError, "JPEG, PNG or WebP", {"concurrencies": (2,), "images": [b"no image"]}),
        (NoAnswerError, "--seconds", {"concurrencies": (1,), "seconds": 1e-9, "warmup_seconds": 0}),
    ],
)
def test_measurements_without_a_result_are_errors(
    server: ServerProcess, error: type[Exception], fact: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(error, match=fact):
        list(measure_server(server.address, ServeSettings(**{"seconds": 0.5, **settings})))


def test_missing_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError):
        list(measure_server("127.0.0.1:1", ServeSettings(concurrencies=(1,), seconds=0.1)))
    with pytest.raises(ServerStartError), running_server(tmp_path):
        pass


@pytest.mark.parametrize(
    ("args", "fact"),
    [(["127.0.0.1:1", "--engine-rate"], "not a bundle"),
     (["127.0.0.1:1", "--", "--max-batch", "2"], "not a bundle"),
     (["BUNDLE", "--", "--max-batch", "0"], "--max-batch is 0"),
     (["BUNDLE", "--", "--max-bach", "1"], "--max-bach"), (["BUNDLE", "--rate", "0"], "--rate"),
     (["BUNDLE", "--rate", "1", "--seed", "-1"], "--seed"),
     (["BUNDLE", "--peer", "unbatched", "--", "--max-batch", "1"], "raise --max-batch"),
     (["BUNDLE", "--http", "1", "--tls"], "leave out --http")],
)  # fmt: skip
def test_invalid_arguments_are_errors(bundle: Path, args: list[str], fact: str) -> None:
    result = run(*(bundle if arg == "BUNDLE" else arg for arg in args))
    assert result.exit_code == 2
    assert fact in result.stderr


@pytest.mark.slow
def test_server_with_tls_and_tokens_is_measured(bundle: Path, tmp_path: Path) -> None:
    authority, record = trustme.CA(), tmp_path / "record.json"
    root, certificate, key, token = (tmp_path / name for name in ("root", "cert", "key", "token"))
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(root)
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    token.write_text("a-token-of-a-client\n")
    loads = ("--concurrency", 1, "--streamed", 1, "--seconds", 1, "--warmup", 0)
    client = ("--root-certificate", root, "--token-file", token)
    options = ("--tls-certificate", certificate, "--tls-key", key, "--token-file", token)
    result = run(bundle, *loads, *client, "--json", record, "--", *options)
    assert result.exit_code == 0, result.output
    for measured in json.loads(record.read_text())["results"]:
        assert measured["requests"]
        assert not measured["failures"]


def test_rates_alone_need_no_closed_loop(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    options = ("--rate", 5, "--seconds", 1, "--warmup", 0, "--masks", "none", "--json", path)
    result = run(server.address, *options)
    assert result.exit_code == 0, result.output
    (measured,) = json.loads(path.read_text())["results"]
    assert measured["load"] == {"rate": 5.0, "arrivals": "poisson"}
    assert measured["server"] is None


def test_failed_measurement_keeps_the_results_before_it(
    server: ServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    # No request is due at the second rate.
    options = ("--rate", 10, "--rate", 1e-6, "--seconds", 1, "--warmup", 0, "--json", path)
    result = run(server.address, *options)
    assert isinstance(result.exception, NoAnswerError)
    (measured,) = json.loads(path.read_text())["results"]
    assert measured["load"]["rate"] == 10
    assert "(ended early)" in result.stdout

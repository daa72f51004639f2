"""Record of `bench serve` from constructed results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from maskrcnn_trt.benchmarks.bulk.measure import BulkResult
from maskrcnn_trt.benchmarks.common.machine import MachineInfo
from maskrcnn_trt.benchmarks.common.processes import ProcessUsage, ThreadUsage
from maskrcnn_trt.benchmarks.common.record import write_record
from maskrcnn_trt.benchmarks.common.timing import Latency
from maskrcnn_trt.benchmarks.serve.load import ClosedLoop, HttpLoop, Load, OpenLoop
from maskrcnn_trt.benchmarks.serve.record import describe_result, serve_goals, serve_record
from maskrcnn_trt.benchmarks.serve.results import ClientUse, Failures, RequestTimes, ServeResult

H100 = MachineInfo(
    "a CPU", 16, ("NVIDIA H100 80GB HBM3 (driver 580.1)",), "3.12.3", {"torch": "2.11"}
)
BULK = BulkResult("torch", "fp16", "cuda", 8, 640.0, 800.0, {}, 100.0)


def make_result(load: Load, rate: float, milliseconds: float, max_batch: int = 8) -> ServeResult:
    return ServeResult(
        max_batch=max_batch,
        load=load,
        offered_per_second=rate,
        images_per_second=rate,
        batches_at_once=0.9,
        requests=900,
        latency=Latency(*([milliseconds] * 6)),
        mean_batch_size=7.5,
        times=RequestTimes(*(share * milliseconds for share in (0.1, 0.2, 0.5, 0.1, 0.1))),
        failures=[],
        client=ClientUse(0.25, 0.5, 0.75),
        server=ProcessUsage(
            3.5,
            [100.0] * 10 + [105.0] * 10,
            [
                ThreadUsage(1, "front end", "main", 1, 0.5),
                ThreadUsage(2, "worker process", "batch", 5, 2.0),
                ThreadUsage(0, "maskrcnn", "main", 1, 1.0),
            ],
        ),
    )


RESULTS = (
    make_result(ClosedLoop(1), 100, 10),
    make_result(ClosedLoop(64), 600, 20),
    make_result(OpenLoop(300), 300, 31),
    make_result(OpenLoop(540, "constant"), 540, 33),
    replace(
        make_result(OpenLoop(900), 590, 200),
        failures=[Failures("RESOURCE_EXHAUSTED", 300, Latency(*([2.0] * 6)))],
    ),
    make_result(ClosedLoop(64), 400, 80, max_batch=1),
    make_result(ClosedLoop(64, streamed=True), 700, 18),
)


def test_page_and_plots(tmp_path: Path) -> None:
    page = write_record(serve_record(RESULTS, "some images", 2.0, BULK, H100), tmp_path)
    text = page.read_text()
    assert "| 64 clients | 8 | 600.0 | 20.0 | 20.0 | 20.0 | 20.0 | 20.0 | 0 |" in text
    assert "| 64 clients streamed | 8 | 700.0 |" in text
    assert "| poisson 900.0/s (150%) | 8 | 590.0 |" in text
    assert "| 1 client | 8 | 7.5 | 1.0 | 2.0 | 5.0 | 1.0 | 1.0 | 30.0% |" in text
    assert (
        "| 1 client | 8 | 0.90 | 3.50 | 10.00 | 5.00 | 20.00 | 7.50 | 100 to 105 | 0.25 | 0.5 |"
        in text
    )
    assert "| 1 client | front end 1 | main | 1 | 5.00 |" in text
    assert "| 1 client | worker 2 | batch | 5 | 20.00 |" in text
    failures = next(
        line for line in text.splitlines() if line.startswith("- Load poisson 900.0/s: ")
    )
    for fact in (
        "300 of 1200 requests",
        "RESOURCE_EXHAUSTED",
        "Half of the requests with this status ended within 2.0",
    ):
        assert fact in failures
    with Image.open(page.with_suffix(".png")) as image:
        assert min(image.size) > 500
    content = json.loads(page.with_suffix(".json").read_text())
    assert content["results"][3]["load"] == {"rate": 540, "arrivals": "constant"}
    assert content["max_delay_ms"] == 2.0
    assert content["bulk"]["images_per_second"] == 640.0


def test_goals_compare_with_the_engine_and_unbatched_serving() -> None:
    engine, streamed, batching, half, most, over = serve_goals(RESULTS, 2.0, BULK)
    for fact in ("600.0 images/s", "75%", "800.0", "94%", "640.0", "70% is met"):
        assert fact in engine
    assert streamed.startswith(
        "64 clients streamed: the server reaches 700.0 images/s. This is 88%"
    )
    assert "1.50 times" in batching
    for fact in ("0 of 900 requests failed", "31.0 ms", "32.0 ms:", "The goal is met"):
        assert fact in half
    assert "constant 540.0/s (90%)" in most
    assert "32.0 ms:" in most
    assert "The goal is missed" in most
    for fact in (
        "300 of 1200 requests failed",
        "99% of these within 2.0 ms",
        "200.0 ms",
        "100 to 105 MiB",
    ):
        assert fact in over


@pytest.mark.parametrize(
    "results",
    [RESULTS[:1], RESULTS[2:3], RESULTS[-1:], [replace(RESULTS[0], server=None)]],
    ids=["closed", "open", "streamed", "elsewhere"],
)
def test_record_of_one_load(results: list[ServeResult], tmp_path: Path) -> None:
    record = serve_record(results, "some images", machine=H100)
    assert record.goals == []
    assert "## Goals" not in write_record(record, tmp_path).read_text()


def test_result_is_described_in_one_line() -> None:
    assert describe_result(RESULTS[0]) == "1 client: 100.0 images/s, p50 10.0 ms, p99 10.0 ms"
    assert describe_result(RESULTS[4]).endswith("p99 200 ms, 300 failed")


def test_http_is_compared_with_as_many_clients_over_grpc() -> None:
    results = [
        make_result(ClosedLoop(8), 100, 10),
        make_result(HttpLoop(8), 90, 11),
        make_result(HttpLoop(64), 300, 20),
    ]
    (goal,) = serve_goals(results, None, None)
    assert "8 clients over HTTP" in goal
    assert "90%" in goal

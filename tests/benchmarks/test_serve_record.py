"""The page about serving, from made-up results."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from maskrcnn_trt.benchmarks.bulk import BulkResult
from maskrcnn_trt.benchmarks.latency import Latency
from maskrcnn_trt.benchmarks.machine import Machine
from maskrcnn_trt.benchmarks.process_usage import ProcessUsage
from maskrcnn_trt.benchmarks.serve_load import ClosedLoop, Load, OpenLoop
from maskrcnn_trt.benchmarks.serve_record import goal_sentences, write_record
from maskrcnn_trt.benchmarks.serve_report import ServeReport, result_sentence
from maskrcnn_trt.benchmarks.serve_results import ClientUse, Refusals, RequestTimes, ServeResult

H100 = Machine("a CPU", 16, ("NVIDIA H100 80GB HBM3 (driver 580.1)",), "3.12.3", {"torch": "2.11"})
BULK = BulkResult("torch", "fp16", "cuda", 8, 640.0, 800.0, {}, 100.0)


def made_up(load: Load, rate: float, milliseconds: float, max_batch: int = 8) -> ServeResult:
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
        refusals=[],
        client=ClientUse(0.25, 0.5),
        server=ProcessUsage(3.5, [100.0] * 10 + [105.0] * 10),
    )


RESULTS = (
    made_up(ClosedLoop(1), 100, 10),
    made_up(ClosedLoop(64), 600, 20),
    made_up(OpenLoop(300), 300, 31),
    made_up(OpenLoop(540, "constant"), 540, 33),
    replace(
        made_up(OpenLoop(900), 590, 200),
        refusals=[Refusals("RESOURCE_EXHAUSTED", 300, Latency(*([2.0] * 6)))],
    ),
    made_up(ClosedLoop(64), 400, 80, max_batch=1),
    made_up(ClosedLoop(64, streamed=True), 700, 18),
)


def report_of(*results: ServeResult, bulk: BulkResult | None = BULK) -> ServeReport:
    return ServeReport(results or RESULTS, machine=H100, max_delay_ms=2.0, bulk=bulk)


def test_record_is_a_page_with_a_picture(tmp_path: Path) -> None:
    page = write_record(report_of(), "pictures", tmp_path / "new")
    assert re.fullmatch(r"serve-h100-\d{6}\.md", page.name)
    text = page.read_text()
    assert f"]({page.stem}.png)" in text
    assert "| 64 clients | 8 | 600.0 | 20.0 | 20.0 | 20.0 | 20.0 | 20.0 | 0 |" in text
    assert "| 64 clients streamed | 8 | 700.0 |" in text
    assert "| poisson 900.0/s (150%) | 8 | 590.0 |" in text
    assert "| 1 client | 8 | 7.5 | 1.0 | 2.0 | 5.0 | 1.0 | 1.0 | 30.0% |" in text
    assert "| 1 client | 8 | 0.90 | 3.50 | 100 to 105 | 0.25 | 0.5 |" in text
    assert "- poisson 900.0/s: 300 of 1200 requests ended with RESOURCE_EXHAUSTED, p50 2.0" in text
    assert max(map(len, text.split("## What is counted")[1].splitlines())) <= 100
    with Image.open(page.with_suffix(".png")) as picture:
        assert min(picture.size) > 500
    found = json.loads(page.with_suffix(".json").read_text())
    assert found["results"][3]["load"] == {"rate": 540, "arrivals": "constant"}


def test_goals_are_held_against_what_was_measured_beside() -> None:
    engine, streamed, batching, half, most, over = goal_sentences(report_of())
    assert engine == (
        "64 clients: 600.0 images/s are 75% of the engine's own 800.0, and 94% of the 640.0 that "
        "go without a server; the bar of 70% is met."
    )
    assert streamed.startswith("64 clients streamed: 700.0 images/s are 88% of the engine's own")
    assert batching == (
        "Batches of up to 8 give 600.0 images/s, batches of one 400.0: 1.50 times as many."
    )
    assert "0 of 900 refused; p99 of the others 31.0 ms; the bar of 32.0 ms is met" in half
    assert "constant 540.0/s (90%)" in most
    assert "the bar of 32.0 ms is missed" in most
    assert "300 of 1200 refused with a p99 of 2.0 ms; p99 of the others 200.0 ms; memory" in over
    assert over.endswith("memory from 100 to 105 MiB.")


@pytest.mark.parametrize(
    "results",
    [RESULTS[:1], RESULTS[2:3], RESULTS[-1:], [replace(RESULTS[0], server=None)]],
    ids=["closed", "open", "streamed", "elsewhere"],
)
def test_less_can_be_measured(results: list[ServeResult], tmp_path: Path) -> None:
    report = report_of(*results, bulk=None)
    assert goal_sentences(report) == []
    page = write_record(replace(report, max_delay_ms=None), "pictures", tmp_path)
    assert "## Goals" not in page.read_text()


def test_a_result_is_a_line() -> None:
    assert result_sentence(RESULTS[0]) == "1 client: 100.0 images/s, p50 10.0 ms, p99 10.0 ms"
    assert result_sentence(RESULTS[4]).endswith("p99 200 ms, 300 refused")

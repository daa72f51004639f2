"""The page about inference speed, from made-up results of an H100."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from maskrcnn_trt.benchmarks.engines import DataPlace
from maskrcnn_trt.benchmarks.infer import InferFailure, InferResult
from maskrcnn_trt.benchmarks.infer_record import goal_sentences, write_record
from maskrcnn_trt.benchmarks.latency import Latency
from maskrcnn_trt.benchmarks.machine import Machine
from maskrcnn_trt.benchmarks.matmul_floor import MatmulFloor
from maskrcnn_trt.benchmarks.report import INFER_COLUMNS, InferReport, infer_rows
from maskrcnn_trt.benchmarks.stages import IDLE, STAGES, KernelTotal, StageTimes
from maskrcnn_trt.model.manifest import Precision

H100 = Machine("a CPU", 16, ("NVIDIA H100 80GB HBM3 (driver 580.1)",), "3.12.3", {"torch": "2.11"})
FLOORS = (MatmulFloor("fp16", 795.0, 530_000_000_000), MatmulFloor("fp32", 53.0, 530_000_000_000))


def made_up(
    engine: str,
    batch: int,
    speed: float,
    precision: Precision = "fp16",
    data: DataPlace = "device",
) -> InferResult:
    return InferResult(
        model="bundle",
        engine=engine,
        precision=precision,
        device="cuda",
        data=data,
        bucket="800x1344",
        batch=batch,
        iterations=100,
        images_per_second=speed,
        latency=Latency(*([1000 * batch / speed] * 6)),
        peak_memory_mib=500.0 * batch,
        memory="driver" if engine == "onnxruntime" else "torch",
        detections_per_image=7.25,
    )


RESULTS = (
    made_up("torch", 1, 250),
    made_up("torch", 1, 200, data="host"),
    made_up("torch", 8, 600),
    made_up("torch", 8, 500, data="host"),
    made_up("eager", 8, 160),
    made_up("torchvision", 1, 20),
    made_up("torchvision", 8, 24),
    made_up("torch", 8, 60, "fp32"),
    made_up("onnxruntime", 8, 30, "fp32"),
)
FAILURES = (
    InferFailure("bundle", "onnxruntime", "bf16", None, "there is no such model"),
    InferFailure("bundle", "eager", "fp32", 16, "OutOfMemoryError: CUDA out of memory."),
)
STAGE_TIMES = tuple(
    StageTimes(
        engine="torch",
        precision="fp16",
        batch=batch,
        milliseconds=dict.fromkeys((*STAGES, IDLE), 0.3 * batch),
        costliest=[KernelTotal("convolve", 53, 1.25 * batch), KernelTotal("sort_top_k", 4, 0.1)],
    )
    for batch in (1, 8)
)


def report_of(results: Sequence[InferResult] = RESULTS, machine: Machine = H100) -> InferReport:
    return InferReport(
        results, machine=machine, failures=FAILURES, floors=FLOORS, stages=STAGE_TIMES
    )


def test_record_is_a_page_with_a_picture(tmp_path: Path):
    page = write_record(report_of(), tmp_path / "new")
    assert re.fullmatch(r"infer-h100-\d{6}\.md", page.name)
    text = page.read_text()
    assert f"]({page.stem}.png)" in text
    assert len(re.findall(r"^\| (torch|eager|torchvision|onnxruntime) \|", text, re.M)) == 11
    assert "- onnxruntime in bf16: there is no such model" in text
    assert "- eager in fp32 at batch 16: OutOfMemoryError" in text
    assert "| 8 | 2.400 | 2.400 | 2.400 | 2.400 | 2.400 | 2.400 |" in text
    assert "| `convolve` | 53 | 10.000 |" in text
    assert "0.53 TFLOP an image" in text
    assert "fp16 795 TFLOP/s, fp32 53.0 TFLOP/s" in text
    assert max(map(len, text.split("## What is counted")[1].splitlines())) <= 100
    with Image.open(page.with_suffix(".png")) as picture:
        assert min(picture.size) > 500
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10
    found = json.loads(page.with_suffix(".json").read_text())
    assert len(found["results"]) == 9
    assert found["stages"][1]["costliest"][0]["name"] == "convolve"


def test_cpu_record_has_neither_goals_nor_stages(tmp_path: Path):
    cpu = replace(H100, gpus=())
    result = replace(made_up("eager", 1, 0.5), device="cpu", memory="cpu", bucket="96x160")
    text = write_record(InferReport([result], machine=cpu), tmp_path).read_text()
    assert "none, the CPU" in text
    for absent in ("Goals", "by stage", "Not measured", '"floor" is'):
        assert absent not in text


def test_rows_compare_with_the_peer_and_the_floor_of_their_precision():
    rows = infer_rows("fp16", RESULTS, FAILURES, FLOORS)
    cells = [dict(zip(INFER_COLUMNS, row, strict=True)) for row in rows]
    assert [c["data"] for c in cells[:4]] == ["cuda", "cuda", "host", "host"]
    assert [c["times"] for c in cells] == ["12.5", "25.0", "10.0", "20.8", "6.67", "1.00", "1.00"]
    assert cells[1]["floor"] == "40.0%"
    assert {c["found"] for c in cells} == {"7.2"}
    fp32 = infer_rows("fp32", RESULTS, FAILURES, FLOORS)
    cells = [dict(zip(INFER_COLUMNS, row, strict=True)) for row in fp32]
    assert [c["MiB"] for c in cells] == ["4000", "4000*", ""]
    assert {c["times"] for c in cells} == {""}
    assert (cells[2]["engine"], cells[2]["batch"], cells[2]["images/s"]) == (
        "eager",
        "16",
        "failed",
    )


@pytest.mark.parametrize(
    ("speed", "verdicts"),
    [(701, ("met", "met")), (699, ("met", "missed")), (449, ("missed", "missed"))],
)
def test_goals_are_met_or_missed(speed: float, verdicts: tuple[str, str]):
    sentences = goal_sentences(report_of([made_up("torch", 8, speed), made_up("torch", 1, 250)]))
    assert sentences == [
        f"Batch 8 in fp16 reaches {speed} images/s: the bar of 450 is {verdicts[0]}, the goal of "
        f"700 is {verdicts[1]}.",
        "Batch 8 in fp16 takes 4.19 GB: the bar of 6 GB is met.",
        "Batch 1 in fp16 takes 4.00 ms: the bar of 5 ms is met, the goal of 3 ms is missed.",
    ]


def test_goals_are_of_certain_machines_and_sizes_and_of_the_bundle_on_the_gpu():
    assert goal_sentences(report_of(machine=replace(H100, gpus=("NVIDIA L4 (driver 1)",)))) == []
    assert goal_sentences(report_of([replace(RESULTS[2], bucket="96x160")])) == []
    others = [made_up("eager", 8, 900), made_up("torch", 8, 900, data="host")]
    assert goal_sentences(report_of(others)) == []
    assert len(goal_sentences(report_of(machine=replace(H100, gpus=("NVIDIA H200 (1)",))))) == 3

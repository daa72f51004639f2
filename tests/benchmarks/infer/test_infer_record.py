"""Record of `bench infer` from constructed results of an H100."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from maskrcnn_trt.benchmarks.common.gpu_time import (
    IDLE,
    STAGES,
    KernelTotal,
    StageTimes,
)
from maskrcnn_trt.benchmarks.common.machine import MachineInfo, MatmulRoofline
from maskrcnn_trt.benchmarks.common.record import write_record
from maskrcnn_trt.benchmarks.common.timing import Latency
from maskrcnn_trt.benchmarks.infer.measure import InferFailure, InferResult
from maskrcnn_trt.benchmarks.infer.record import COLUMNS, infer_goals, infer_record, speed_rows
from maskrcnn_trt.benchmarks.infer.runners import DataPlace
from maskrcnn_trt.model.bundle.manifest import Precision

H100 = MachineInfo(
    "a CPU", 16, ("NVIDIA H100 80GB HBM3 (driver 580.1)",), "3.12.3", {"torch": "2.11"}
)
ROOFLINES = (
    MatmulRoofline("fp16", 795.0, 530_000_000_000),
    MatmulRoofline("fp32", 53.0, 530_000_000_000),
)


def make_result(
    engine: str, batch: int, speed: float, precision: Precision = "fp16", data: DataPlace = "device"
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
    make_result("torch", 1, 250), make_result("torch", 1, 200, data="host"),
    make_result("torch", 8, 600), make_result("torch", 8, 500, data="host"),
    make_result("eager", 8, 160), make_result("torchvision", 1, 20),
    make_result("torchvision", 8, 24), make_result("torch", 8, 60, "fp32"),
    make_result("onnxruntime", 8, 30, "fp32"),
)  # fmt: skip
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


def test_page_and_plots(tmp_path: Path):
    page = write_record(infer_record(RESULTS, FAILURES, ROOFLINES, STAGE_TIMES, H100), tmp_path)
    text = page.read_text()
    assert len(re.findall(r"^\| (torch|eager|torchvision|onnxruntime) \|", text, re.M)) == 11
    assert "- onnxruntime in bf16: there is no such model" in text
    assert "- eager in fp32 at batch 16: OutOfMemoryError" in text
    assert "| 8 | 2.400 | 2.400 | 2.400 | 2.400 | 2.400 | 2.400 |" in text
    assert "| `convolve` | 53 | 10.000 |" in text
    assert "0.53 TFLOP" in text
    assert "fp16 795 TFLOP/s, fp32 53.0 TFLOP/s" in " ".join(text.split())
    with Image.open(page.with_suffix(".png")) as image:
        assert image.width > 1500
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10
    content = json.loads(page.with_suffix(".json").read_text())
    assert len(content["results"]) == 9
    assert content["stages"][1]["costliest"][0]["name"] == "convolve"
    assert content["failures"][0]["batch"] is None
    assert content["floors"][1]["teraflops_per_second"] == 53.0


def test_cpu_record_has_neither_goals_nor_stages(tmp_path: Path):
    cpu = replace(H100, gpus=())
    result = replace(make_result("eager", 1, 0.5), device="cpu", memory="cpu", bucket="96x160")
    text = write_record(infer_record([result], machine=cpu), tmp_path).read_text()
    for absent in ("Goals", "by stage", "Not measured", "upper bound"):
        assert absent not in text


def test_rows_compare_with_torchvision_and_the_roofline_of_their_precision():
    rows = speed_rows("fp16", RESULTS, FAILURES, ROOFLINES)
    cells = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert [c["data"] for c in cells[:4]] == ["cuda", "cuda", "host", "host"]
    assert [c["speedup"] for c in cells] == ["12.5", "25.0", "10.0", "20.8", "6.67", "1.00", "1.00"]
    assert cells[1]["of roofline"] == "40.0%"
    assert {c["boxes"] for c in cells} == {"7.2"}
    rows = speed_rows("fp32", RESULTS, FAILURES, ROOFLINES)
    cells = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert [c["MiB"] for c in cells] == ["4000", "4000*", ""]
    assert {c["speedup"] for c in cells} == {""}
    failed = cells[2]
    assert (failed["engine"], failed["batch"], failed["images/s"]) == ("eager", "16", "failed")


def test_models_of_one_engine_are_named_and_compared_with_their_own_torchvision(tmp_path: Path):
    results = [
        replace(make_result(engine, 8, speed), model=model)
        for model, engine, speed in (
            ("small.pth", "eager", 100), ("small.pth", "torchvision", 50),
            ("large.pth", "eager", 10), ("large.pth", "torchvision", 5), ("bundle", "torch", 60),
        )
    ]  # fmt: skip
    cells = [dict(zip(COLUMNS, row, strict=True)) for row in speed_rows("fp16", results, (), ())]
    assert [(c["engine"], c["speedup"]) for c in cells] == [
        ("eager, small.pth", "2.00"), ("torchvision, small.pth", "1.00"),
        ("eager, large.pth", "2.00"), ("torchvision, large.pth", "1.00"), ("torch", ""),
    ]  # fmt: skip
    unfinished = [r for r in results if (r.model, r.engine) != ("large.pth", "torchvision")]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in speed_rows("fp16", unfinished, (), ())]
    assert [row["speedup"] for row in rows] == ["2.00", "1.00", "", ""]
    failure = InferFailure("large.pth", "torchvision", "fp16", 8, "no memory")
    page = write_record(infer_record(unfinished, [failure], machine=H100), tmp_path)
    assert "- torchvision, large.pth in fp16 at batch 8: no memory" in page.read_text()


@pytest.mark.parametrize(
    ("speed", "verdicts"),
    [(701, ("met", "met")), (699, ("met", "missed")), (449, ("missed", "missed"))],
)
def test_goals_are_met_or_missed(speed: float, verdicts: tuple[str, str]):
    results = [make_result("torch", 8, speed), make_result("torch", 1, 250)]
    throughput, memory, latency = infer_goals(results, H100)
    assert f"{speed} images/s" in throughput
    assert re.findall("met|missed", throughput) == list(verdicts)
    assert "4.19 GB" in memory
    assert memory.endswith("6 GB is met.")
    assert "4.00 ms" in latency
    assert re.findall("met|missed", latency) == ["met", "missed"]


def test_goals_apply_to_some_gpus_and_one_input_size_and_engine():
    assert infer_goals(RESULTS, replace(H100, gpus=("NVIDIA L4 (driver 1)",))) == []
    assert infer_goals([replace(RESULTS[2], bucket="96x160")], H100) == []
    others = [make_result("eager", 8, 900), make_result("torch", 8, 900, data="host")]
    assert infer_goals(others, H100) == []
    assert len(infer_goals(RESULTS, replace(H100, gpus=("NVIDIA H200 (1)",)))) == 3

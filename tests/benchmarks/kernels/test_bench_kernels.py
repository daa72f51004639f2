"""`bench kernels`: outputs of the baselines, goals, and the record."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor

from maskrcnn_trt.benchmarks.common.record import write_record
from maskrcnn_trt.benchmarks.kernels import COLUMNS, kernel_row, kernels, kernels_record
from maskrcnn_trt.benchmarks.kernels.cases import KERNEL_CASES, working_cases
from maskrcnn_trt.benchmarks.kernels.measure import (
    BaselineResult,
    KernelCase,
    KernelGoal,
    KernelResult,
    Workload,
)
from maskrcnn_trt.plugins.run_lengths import coco_strings

SMALL = {"batch": 2, "height": 128, "width": 192, "image_width": 187, "share": 0.04}


def make_result(
    milliseconds: float, goal: KernelGoal | None, *peers: BaselineResult
) -> KernelResult:
    speed = 24 / milliseconds
    return KernelResult("nms_keep", "2x9", "latency", milliseconds, speed, 2000.0, peers, goal)


def as_tensor(output: object) -> Tensor:
    """Return a tensor, the first of a tuple, or a list stacked."""
    if isinstance(output, list):
        return torch.stack(output)
    return output[0] if isinstance(output, tuple) else output


def assert_same_pooling(case: KernelCase) -> None:
    for baseline in case.baselines:
        ours, theirs = case.run(), baseline.run()
        if isinstance(ours, Tensor):
            ours, theirs = [ours.flatten(0, 1)], [theirs]
        for own, other in zip(ours, theirs, strict=True):
            # Torchvision's boxes are rounded to the features' type.
            tolerance = 0.03 if own.dtype == torch.float16 else 1e-5
            assert (own - other).abs().mean() <= tolerance * own.abs().mean()


def assert_close(case: KernelCase) -> None:
    ours = as_tensor(case.run())
    for baseline in case.baselines:
        theirs = as_tensor(baseline.run())
        torch.testing.assert_close(ours, theirs.view_as(ours), atol=1e-4, rtol=1e-4)


def assert_same_nms(case: KernelCase) -> None:
    (baseline,) = case.baselines
    kept = case.run()
    for own, other in zip(kept.view(len(baseline.run()), -1), baseline.run(), strict=True):
        # Torchvision orders the boxes of all sets together, and keeps all that survive.
        assert set(own.nonzero()[:, 0].tolist()) <= set(other.tolist())
    assert kept.any(dim=1).all()


def assert_same_top_k(case: KernelCase) -> None:
    values, _ = case.run()
    for baseline in case.baselines:
        assert torch.equal(values, baseline.run()[0][:, : values.shape[1]])


def assert_same_matches(case: KernelCase) -> None:
    _, positive, negative = case.run()
    (theirs,) = (torch.stack(baseline.run()) for baseline in case.baselines)
    assert torch.equal(positive, theirs >= 0)
    assert torch.equal(negative, theirs == -1)


def assert_same_masks(case: KernelCase) -> None:
    (baseline,) = case.baselines
    theirs = torch.from_numpy(np.array(baseline.run()))
    assert theirs.any()
    assert torch.equal(case.run(), theirs.view_as(case.run()).float())


def assert_same_rles(case: KernelCase) -> None:
    counts, num_runs = case.run()
    strings = coco_strings(counts.numpy(), num_runs.numpy())
    encoded, from_torchvision, from_serving = (baseline.run() for baseline in case.baselines)
    assert strings == [rle["counts"] for rle in encoded] == [r["counts"] for r in from_torchvision]
    assert strings == [rle.counts for rle in from_serving]


def assert_same_strings(case: KernelCase) -> None:
    (baseline,) = case.baselines
    text, spans = case.run()
    characters = text.numpy().tobytes()
    strings = [characters[start : start + length] for start, length in spans.tolist()]
    assert strings == baseline.run()


def assert_same_pixels(case: KernelCase) -> None:
    (baseline,) = case.baselines
    assert (case.run().int() - baseline.run().int()).abs().max() <= 1


COMPARISONS: dict[str, Callable[[KernelCase], None]] = {
    "pyramid_roi_align": assert_same_pooling,
    "pyramid_roi_align_backward": assert_same_pooling,
    "nms_keep": assert_same_nms,
    "stable_top_k": assert_same_top_k,
    "box_iou": assert_close,
    "match_boxes": assert_same_matches,
    "decode_boxes": assert_close,
    "encode_boxes": assert_close,
    "grid_anchors": assert_close,
    "mask_targets_from_crops": assert_close,
    "mask_targets_from_polygons": assert_same_masks,
    "paste_rle": assert_same_rles,
    "compress_runs": assert_same_strings,
    "resize_pad": assert_same_pixels,
}


GOALS: dict[str, KernelGoal | None] = dict.fromkeys(KERNEL_CASES) | {
    "pyramid_roi_align": KernelGoal(milliseconds=0.6, times_peer=5),
    "nms_keep": KernelGoal(milliseconds=0.4),
    "paste_rle": KernelGoal(milliseconds=1),
}


@pytest.mark.parametrize("kernel", KERNEL_CASES)
def test_baselines_compute_the_same(kernel: str):
    cases = list(working_cases(Workload(device="cpu", **SMALL), [kernel]))
    assert len({case.size for case in cases}) == len(cases) > 0
    for case in cases:
        assert case.kernel == kernel
        assert case.megabytes > 0
        COMPARISONS[kernel](case)
    assert {case.goal for case in cases} - {None} == {GOALS[kernel]} - {None}


def test_traffic_is_that_of_inputs_and_outputs():
    (case,) = working_cases(Workload(device="cpu", batch=2, height=64, width=96), ["box_iou"])
    anchors = 3 * (16 * 24 + 8 * 12 + 4 * 6 + 2 * 3 + 1 * 2)
    assert case.megabytes == pytest.approx(
        (2 * 60 * 16 + anchors * 16 + 2 * 60 * anchors * 4) / 1e6
    )


@pytest.mark.parametrize(
    ("milliseconds", "peer", "goal", "met"),
    [(0.5, 3.0, None, True), (0.5, 3.0, KernelGoal(0.6), True),
     (0.6, 3.0, KernelGoal(0.6), False), (0.5, 3.0, KernelGoal(0.6, times_peer=6), True),
     (0.5, 2.9, KernelGoal(0.6, times_peer=6), False),
     (0.7, 9.0, KernelGoal(0.6, times_peer=6), False)],
)  # fmt: skip
def test_goals_are_met_or_missed(
    milliseconds: float, peer: float, goal: KernelGoal | None, met: bool
):
    result = make_result(milliseconds, goal, BaselineResult("torchvision", peer, on_host=False))
    assert result.meets_goal is met


RESULTS = [
    make_result(
        0.5,
        KernelGoal(0.6, times_peer=5),
        BaselineResult("torchvision", 3.0, on_host=False),
        BaselineResult("pycocotools", 1234.0, on_host=True),
    ),
    make_result(0.75, KernelGoal(0.4), BaselineResult("torchvision", 3.0, on_host=False)),
    make_result(0.012, None),
]


def test_row_has_times_ratios_and_goal():
    first, second, third = (
        dict(zip(COLUMNS, kernel_row(result), strict=True)) for result in RESULTS
    )
    assert first["baselines"] == "torchvision 3.00, pycocotools 1234*"
    assert first["speedup"] == "6.00, 2468"
    assert first["goal"] == "< 0.6 ms, >= 5 times: met"
    assert (first["ms"], first["GB/s"], first["of copying"]) == ("0.500", "48.0", "2.4%")
    assert (second["speedup"], second["goal"]) == ("4.00", "< 0.4 ms: missed")
    assert third["baselines"] == third["speedup"] == third["goal"] == ""
    first, second = kernels_record(RESULTS).goals
    for fact in ("`nms_keep`, 2x9", "0.500 ms", "6.00 times", "(< 0.6 ms, >= 5 times) is met"):
        assert fact in first
    assert "0.750 ms; the goal (< 0.4 ms) is missed" in second


@pytest.mark.parametrize(
    "results", [RESULTS, RESULTS[2:]], ids=["baselines", "no baseline, no goal"]
)
def test_page_and_plot(results: list[KernelResult], tmp_path: Path):
    page = write_record(kernels_record(results), tmp_path)
    text = page.read_text()
    assert text.count("| nms_keep | 2x9 |") == len(results)
    assert text.count("| `nms_keep` | latency |") == 1
    assert "2000 GB/s" in " ".join(text.split())
    assert ("## Goals" in text) is (results is RESULTS)
    with Image.open(page.with_suffix(".png")) as image:
        assert min(image.size) > 100
    content = json.loads(page.with_suffix(".json").read_text())
    assert content["results"] == json.loads(json.dumps([asdict(result) for result in results]))


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--kernel", "nms"], "choose from pyramid_roi_align, "),
        pytest.param(
            [],
            "NVIDIA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_unknown_kernels_and_machines_without_a_gpu_are_errors(options: list[str], fact: str):
    result = CliRunner().invoke(kernels, options)
    assert result.exit_code == 2
    assert fact in result.output


@pytest.mark.gpu
def test_kernels_are_measured_on_a_gpu(tmp_path: Path):
    options = ["--kernel", "encode_boxes", "--kernel", "grid_anchors", "--output", str(tmp_path)]
    result = CliRunner().invoke(kernels, options)
    assert result.exit_code == 0, result.output
    (record,) = tmp_path.glob("kernels-*.json")
    encoding, anchors = json.loads(record.read_text())["results"]
    assert (encoding["kernel"], anchors["kernel"]) == ("encode_boxes", "grid_anchors")
    for case in (encoding, anchors):
        assert 0 < case["milliseconds"] < 10
        assert case["copy_gigabytes_per_second"] > 50
        assert case["peers"][0]["milliseconds"] > 0

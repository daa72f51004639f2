"""Kernel benchmarks: the same tasks as their peers', and what is made of the times."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor

from maskrcnn_trt.benchmarks.commands import bench
from maskrcnn_trt.benchmarks.kernel_cases import KERNEL_CASES, working_cases
from maskrcnn_trt.benchmarks.kernel_record import goal_sentences, write_record
from maskrcnn_trt.benchmarks.kernels import Goal, KernelCase, KernelResult, PeerResult
from maskrcnn_trt.benchmarks.report import KERNEL_COLUMNS, Report, in_figures, kernel_rows
from maskrcnn_trt.benchmarks.workload import Workload
from maskrcnn_trt.plugins.run_lengths import coco_strings

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SMALL = {"batch": 2, "height": 128, "width": 192, "image_width": 187, "share": 0.04}


def made_up(milliseconds: float, goal: Goal | None, *peers: PeerResult) -> KernelResult:
    speed = 24 / milliseconds
    return KernelResult("nms_keep", "2x9", "patience", milliseconds, speed, 2000.0, peers, goal)


def stacked(answer: object) -> Tensor:
    """The one tensor of an answer, the first, or a list of them."""
    if isinstance(answer, list):
        return torch.stack(answer)
    return answer[0] if isinstance(answer, tuple) else answer


def pooled(case: KernelCase) -> None:
    for peer in case.peers:
        ours, theirs = case.run(), peer.run()
        if isinstance(ours, Tensor):
            ours, theirs = [ours.flatten(0, 1)], [theirs]
        for own, other in zip(ours, theirs, strict=True):
            # Torchvision's boxes are rounded to the features' type.
            tolerance = 0.03 if own.dtype == torch.float16 else 1e-5
            assert (own - other).abs().mean() <= tolerance * own.abs().mean()


def close(case: KernelCase) -> None:
    ours = stacked(case.run())
    for peer in case.peers:
        theirs = stacked(peer.run())
        torch.testing.assert_close(ours, theirs.view_as(ours), atol=1e-4, rtol=1e-4)


def suppressed(case: KernelCase) -> None:
    (peer,) = case.peers
    kept = case.run()
    for own, other in zip(kept.view(len(peer.run()), -1), peer.run(), strict=True):
        # Torchvision takes the best of all sets first, and has no limit.
        assert set(own.nonzero()[:, 0].tolist()) <= set(other.tolist())
    assert kept.any(dim=1).all()


def selected(case: KernelCase) -> None:
    values, _ = case.run()
    for peer in case.peers:
        assert torch.equal(values, peer.run()[0][:, : values.shape[1]])


def matched(case: KernelCase) -> None:
    _, positive, negative = case.run()
    (theirs,) = (torch.stack(peer.run()) for peer in case.peers)
    assert torch.equal(positive, theirs >= 0)
    assert torch.equal(negative, theirs == -1)


def drawn(case: KernelCase) -> None:
    (peer,) = case.peers
    theirs = torch.from_numpy(np.array(peer.run()))
    assert theirs.any()
    assert torch.equal(case.run(), theirs.view_as(case.run()).float())


def pasted(case: KernelCase) -> None:
    counts, num_runs = case.run()
    strings = coco_strings(counts.numpy(), num_runs.numpy())
    encoded, from_torchvision, from_serving = (peer.run() for peer in case.peers)
    assert strings == [rle["counts"] for rle in encoded] == [r["counts"] for r in from_torchvision]
    assert strings == [rle.counts for rle in from_serving]


def compressed(case: KernelCase) -> None:
    (peer,) = case.peers
    text, lengths = case.run()
    rows = zip(text.numpy(), lengths.tolist(), strict=True)
    assert [row[:length].tobytes() for row, length in rows] == peer.run()


def resized(case: KernelCase) -> None:
    (peer,) = case.peers
    assert (case.run().int() - peer.run().int()).abs().max() <= 1


COMPARISONS: dict[str, Callable[[KernelCase], None]] = {
    "pyramid_roi_align": pooled,
    "pyramid_roi_align_backward": pooled,
    "nms_keep": suppressed,
    "stable_top_k": selected,
    "box_iou": close,
    "match_boxes": matched,
    "decode_boxes": close,
    "encode_boxes": close,
    "grid_anchors": close,
    "mask_targets_from_crops": close,
    "mask_targets_from_polygons": drawn,
    "mask_targets_from_rle": close,
    "paste_rle": pasted,
    "compress_runs": compressed,
    "resize_pad": resized,
}


@pytest.mark.parametrize("kernel", KERNEL_CASES)
def test_peers_have_the_same_task(kernel: str):
    cases = list(working_cases(Workload(device="cpu", **SMALL), [kernel]))
    assert len({case.size for case in cases}) == len(cases) > 0
    for case in cases:
        assert case.kernel == kernel
        assert case.megabytes > 0
        COMPARISONS[kernel](case)


def test_goals_are_those_of_three_kernels():
    cases = working_cases(Workload(device="cpu", **SMALL), KERNEL_CASES)
    goals = {(case.kernel, case.goal) for case in cases if case.goal is not None}
    assert goals == {
        ("pyramid_roi_align", Goal(milliseconds=0.6, times_peer=5)),
        ("nms_keep", Goal(milliseconds=0.4)),
        ("paste_rle", Goal(milliseconds=1)),
    }


def test_least_traffic_is_that_of_inputs_and_outputs():
    (case,) = working_cases(Workload(device="cpu", batch=2, height=64, width=96), ["box_iou"])
    anchors = 3 * (16 * 24 + 8 * 12 + 4 * 6 + 2 * 3 + 1 * 2)
    assert case.megabytes == pytest.approx(
        (2 * 60 * 16 + anchors * 16 + 2 * 60 * anchors * 4) / 1e6
    )


@pytest.mark.parametrize(
    ("milliseconds", "peer", "goal", "met"),
    [
        (0.5, 3.0, None, True),
        (0.5, 3.0, Goal(0.6), True),
        (0.6, 3.0, Goal(0.6), False),
        (0.5, 3.0, Goal(0.6, times_peer=6), True),
        (0.5, 2.9, Goal(0.6, times_peer=6), False),
        (0.7, 9.0, Goal(0.6, times_peer=6), False),
    ],
)
def test_goals_are_met_or_missed(milliseconds: float, peer: float, goal: Goal | None, met: bool):
    result = made_up(milliseconds, goal, PeerResult("torchvision", peer, on_host=False))
    assert result.meets_goal is met


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00512, "0.00512"),
        (0.4567, "0.457"),
        (7.231, "7.23"),
        (999.94, "1000"),
        (12345.6, "12346"),
    ],
)
def test_numbers_have_three_figures(value: float, text: str):
    assert in_figures(value) == text


RESULTS = [
    made_up(
        0.5,
        Goal(0.6, times_peer=5),
        PeerResult("torchvision", 3.0, on_host=False),
        PeerResult("pycocotools", 1234.0, on_host=True),
    ),
    made_up(0.75, Goal(0.4), PeerResult("torchvision", 3.0, on_host=False)),
    made_up(0.012, None),
]


def test_rows_hold_times_ratios_and_goals():
    first, second, third = (
        dict(zip(KERNEL_COLUMNS, row, strict=True)) for row in kernel_rows(RESULTS)
    )
    assert first["peers"] == "torchvision 3.00, pycocotools 1234*"
    assert first["times"] == "6.00, 2468"
    assert first["goal"] == "< 0.6 ms, >= 5 times: met"
    assert (first["ms"], first["GB/s"], first["of copying"]) == ("0.500", "48.0", "2.4%")
    assert (second["times"], second["goal"]) == ("4.00", "< 0.4 ms: missed")
    assert third["peers"] == third["times"] == third["goal"] == ""


def test_a_goal_is_a_sentence():
    first, second = goal_sentences(RESULTS)
    assert first == (
        "`nms_keep`, 2x9: 0.500 ms and 6.00 times as fast as torchvision; the goal, < 0.6 ms, "
        ">= 5 times, is met."
    )
    assert second == "`nms_keep`, 2x9: 0.750 ms; the goal, < 0.4 ms, is missed."


@pytest.mark.parametrize("results", [RESULTS, RESULTS[2:]], ids=["peers", "no peer, no goal"])
def test_kernel_record_is_a_page_with_a_picture(results: list[KernelResult], tmp_path: Path):
    page = write_record(Report(results), results, tmp_path / "new")
    assert re.fullmatch(r"kernels-[a-z0-9]+-\d{6}\.md", page.name)
    text = page.read_text()
    assert f"]({page.stem}.png)" in text
    assert len(re.findall(r"^\| nms_keep \| 2x9 \|", text, re.MULTILINE)) == len(results)
    assert text.count("patience") == 1
    assert "2000 GB/s" in " ".join(text.split())
    assert ("## Goals" in text) is (results is RESULTS)
    with Image.open(page.with_suffix(".png")) as picture:
        assert min(picture.size) > 100
    assert json.loads(page.with_suffix(".json").read_text())["results"] == json.loads(
        json.dumps([asdict(result) for result in results])
    )


def test_an_unknown_kernel_is_refused():
    result = CliRunner().invoke(bench, ["kernels", "--kernel", "nms"])
    assert result.exit_code == 2
    assert "there is no kernel 'nms'; choose from pyramid_roi_align, " in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured():
    result = CliRunner().invoke(bench, ["kernels"])
    assert result.exit_code == 2
    assert "kernels are measured on an NVIDIA GPU, and torch finds none here" in result.output


@pytest.mark.gpu
def test_a_kernel_is_measured_and_recorded(tmp_path: Path):
    options = ["--kernel", "encode_boxes", "--kernel", "grid_anchors", "--output", str(tmp_path)]
    result = CliRunner().invoke(bench, ["kernels", *options])
    assert result.exit_code == 0, result.output
    (record,) = tmp_path.glob("kernels-*.json")
    encoding, anchors = json.loads(record.read_text())["results"]
    assert (encoding["kernel"], anchors["kernel"]) == ("encode_boxes", "grid_anchors")
    for case in (encoding, anchors):
        assert 0 < case["milliseconds"] < 10
        assert case["copy_gigabytes_per_second"] > 50
        assert case["peers"][0]["milliseconds"] > 0

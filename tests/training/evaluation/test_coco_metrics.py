import io
import json
import multiprocessing
import os
import signal
import time
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from rich.console import Console

from maskrcnn_trt.model.bundle.manifest import Category
from maskrcnn_trt.training.config import DatasetConfig, EvaluatorName
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.evaluation import coco_curves
from maskrcnn_trt.training.evaluation.coco_curves import IOU_TYPES, IouType
from maskrcnn_trt.training.evaluation.coco_metrics import class_table, coco_metrics, summary_lines
from maskrcnn_trt.training.evaluation.matching import class_curves, matched_images

CATEGORIES = (Category(id=4, name="disc"), Category(id=9, name="ring"), Category(id=11, name="bar"))
SQUARE = [10.0, 10.0, 40.0, 40.0]
# A disc and a ring of medium size, at the same position.
TRUTH: dict[str, Any] = {
    "info": {},
    "images": [{"id": 1, "height": 100, "width": 100}],
    "categories": [category.model_dump() for category in CATEGORIES],
    "annotations": [
        {"id": n, "image_id": 1, "category_id": c, "bbox": SQUARE, "area": 1600.0, "iscrowd": 0}
        for n, c in ((1, 4), (2, 9))
    ],
}


def _detection(category: int, box: list[float] = SQUARE) -> dict[str, object]:
    return {"image_id": 1, "category_id": category, "bbox": box, "score": 0.9}


def test_metrics_of_an_example_computed_by_hand() -> None:
    """The disc is detected exactly, the ring with IoU 0.7, and a bar where there is none."""
    results = [_detection(4), _detection(9, [10.0, 10.0, 28.0, 40.0]), _detection(11)]
    metrics = coco_metrics(TRUTH, {"bbox": results}, CATEGORIES)
    # The ring counts at 0.50, 0.55, ..., 0.70: half of the thresholds.
    expected = {
        "AP": 0.75, "AP50": 1, "AP75": 0.5, "APs": -1, "APm": 0.75, "APl": -1,
        "AR1": 0.75, "AR10": 0.75, "AR100": 0.75, "ARs": -1, "ARm": 0.75, "ARl": -1,
        "AP/disc": 1, "AP/ring": 0.5, "AP/bar": -1,
    }  # fmt: skip
    assert metrics == pytest.approx({f"bbox/{name}": value for name, value in expected.items()})


@pytest.mark.parametrize("evaluator", get_args(EvaluatorName))
def test_metrics_without_ground_truth_or_detections(evaluator: EvaluatorName) -> None:
    for missing in ("annotations", "images"):
        for results in ([], [_detection(4)]):
            truth = {**TRUTH, missing: []}
            metrics = coco_metrics(truth, {"bbox": results}, CATEGORIES, evaluator)
            assert set(metrics.values()) == {-1}
    metrics = coco_metrics(TRUTH, {"bbox": []}, CATEGORIES, evaluator)
    assert metrics["bbox/AP"] == metrics["bbox/AR100"] == metrics["bbox/AP/disc"] == 0
    assert metrics["bbox/APl"] == metrics["bbox/AP/bar"] == -1


def test_the_summary_has_twelve_lines() -> None:
    lines = summary_lines(coco_metrics(TRUTH, {"bbox": [_detection(4)]}, CATEGORIES), "bbox")
    assert len(lines) == 12
    assert lines[0] == (
        " Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = 0.500"
    )
    assert lines[11] == (
        " Average Recall     (AR) @[ IoU=0.50:0.95 | area= large | maxDets=100 ] = -1.000"
    )


def _printed(metrics: dict[str, float]) -> str:
    console = Console(file=(text := io.StringIO()), width=80)
    console.print(class_table(metrics))
    return text.getvalue()


def test_classes_are_listed() -> None:
    """Their names are not parsed as markup."""
    boxes = coco_metrics(TRUTH, {"bbox": [_detection(4)]}, CATEGORIES)
    masks = {name.replace("bbox", "segm"): value / 2 for name, value in boxes.items()}
    rows = [line.replace("│", " ").split() for line in _printed(boxes | masks).splitlines()]
    assert ["disc", "1.000", "0.500"] in rows
    assert ["ring", "0.000", "0.000"] in rows
    assert ["bar", "-", "-"] in rows
    for name in ("[/x]", "[red]", ":smile:"):
        assert f" {name} " in _printed({f"bbox/AP/{name}": 1.0, f"segm/AP/{name}": 1.0})


def _scene(seed: int, *, crowds: float) -> tuple[dict[str, Any], dict[IouType, list[Any]]]:
    """Return ellipses on eight images, and 120 detections per image. Class "bar" has no objects."""
    rng = np.random.default_rng(seed)
    truth: dict[str, Any] = {**TRUTH, "annotations": []}
    truth["images"] = [{"id": n, "height": 240, "width": 320} for n in range(-3, 5)]
    results: dict[IouType, list[Any]] = {"bbox": [], "segm": []}
    for image_id in range(-2, 5):  # the first image has no objects
        shapes = [(rng.uniform((0, 0, 4, 4), (320, 240, 90, 90)), n % 2) for n in range(5)]
        for shape, label in shapes:
            rle = _ellipse(shape)
            truth["annotations"].append(
                {
                    "id": len(truth["annotations"]) + 1,
                    "image_id": image_id,
                    "category_id": CATEGORIES[label].id,
                    "bbox": coco_mask.toBbox(rle).tolist(),
                    "area": float(coco_mask.area(rle)),
                    "iscrowd": int(rng.random() < crowds),
                    "segmentation": rle,
                }
            )
        for number in range(120):
            shape, label = shapes[number % 5]
            rle = _ellipse(shape + rng.normal(0, 1 + number / 4, 4))
            result = {
                "image_id": image_id,
                "category_id": CATEGORIES[label if rng.random() < 0.9 else 2].id,
                "score": round(rng.random(), 1),  # many are equal
            }
            results["bbox"].append({**result, "bbox": coco_mask.toBbox(rle).tolist()})
            results["segm"].append({**result, "segmentation": rle})
    return truth, results


def _ellipse(shape: NDArray[np.float64]) -> dict[str, Any]:
    """Return the RLE of an ellipse with a centre and two radii."""
    angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    outline = shape[:2] + np.abs(shape[2:]) * np.stack([np.cos(angle), np.sin(angle)], 1)
    polygon = np.clip(outline, 0, (320, 240)).ravel().tolist()
    rle = coco_mask.frPyObjects([polygon], 240, 320)[0]
    return {"size": rle["size"], "counts": rle["counts"].decode()}


@pytest.mark.parametrize("iou_type", IOU_TYPES)
@pytest.mark.parametrize(("crowds", "detected"), [(0, 1), (0.3, 1), (0.3, 0.05), (0.3, 0), (1, 1)])
def test_both_evaluators_give_equal_metrics(
    iou_type: IouType, crowds: float, detected: float
) -> None:
    truth, results = _scene(seed=1, crowds=crowds)
    detections = results[iou_type][: round(detected * len(results[iou_type]))]
    ours, theirs = (
        coco_metrics(deepcopy(truth), {iou_type: detections}, CATEGORIES, evaluator)
        for evaluator in get_args(EvaluatorName)
    )
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, abs=1e-12, rel=0)
    assert len(ours) == 12 + len(CATEGORIES)
    if crowds < 1 and detected == 1:
        assert 0.01 < ours[f"{iou_type}/AP"] < ours[f"{iou_type}/AP50"] < 0.9


def test_processes_give_the_metrics_of_one() -> None:
    truth, results = _scene(seed=4, crowds=0.2)
    copies = 10_000 // len(results["bbox"]) + 1
    many: dict[IouType, list[Any]] = {t: results[t] * copies for t in IOU_TYPES}
    one = coco_metrics(deepcopy(truth), many, CATEGORIES, "pycocotools")
    assert coco_metrics(truth, many, CATEGORIES) == pytest.approx(one, abs=1e-12, rel=0)


def test_one_process_replaces_those_that_a_signal_ends(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One process has the task of the only class, and the other waits for a task."""
    compute, own = coco_curves._curves_of_class, os.getpid()

    def compute_in_this_process(task: Any) -> coco_curves.Curves:
        if os.getpid() != own:
            time.sleep(9)
        return compute(task)

    def interrupt_processes(*_: object) -> None:
        for process in multiprocessing.active_children():
            os.kill(process.pid or 0, signal.SIGINT)

    monkeypatch.setattr(coco_curves, "_PARALLEL_FROM", 0)
    monkeypatch.setattr(coco_curves, "_curves_of_class", compute_in_this_process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    truth = {**TRUTH, "annotations": TRUTH["annotations"][:1]}
    previous = signal.signal(signal.SIGALRM, interrupt_processes)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    metrics = coco_metrics(truth, {"bbox": [_detection(4)]}, CATEGORIES)
    signal.signal(signal.SIGALRM, previous)
    assert metrics["bbox/AP/disc"] == 1
    assert "computed in one process" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_the_curves_of_the_report_give_the_same_ap50(tmp_path: Path) -> None:
    truth, results = _scene(seed=3, crowds=0.2)
    for number, result in enumerate(results["segm"]):
        result["score"] += number * 1e-6  # equal scores have no order
    for image in truth["images"]:
        image["file_name"] = f"{image['id']}.jpg"
        (tmp_path / image["file_name"]).touch()
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    config = DatasetConfig(images=tmp_path, annotations=tmp_path / "truth.json")
    curves = class_curves(matched_images(CocoDataset(config), results["segm"]), len(CATEGORIES))
    means = []
    for curve in curves[:2]:  # the third class has no objects
        precision = [
            curve.precision[curve.recall >= r].max(initial=0) for r in np.linspace(0, 1, 101)
        ]
        means.append(np.mean(precision))
        f1 = curve.f1.tolist()
        threshold = curve.scores[f1.index(max(f1))]
        assert curve.best_threshold == threshold
    metrics = coco_metrics(truth, {"segm": results["segm"]}, CATEGORIES, "pycocotools")
    assert np.mean(means) == pytest.approx(metrics["segm/AP50"], abs=1e-9)
    assert 0.01 < metrics["segm/AP50"] < 0.9


def test_the_faster_evaluator_can_reuse_its_ground_truth() -> None:
    """It adds entries to the ground truth. They must not change later metrics."""
    truth, results = _scene(seed=2, crowds=0.2)
    for iou_type in (*IOU_TYPES, "bbox"):
        fresh, _ = _scene(seed=2, crowds=0.2)
        used, unused = (
            coco_metrics(content, {iou_type: results[iou_type]}, CATEGORIES)
            for content in (truth, fresh)
        )
        assert used == unused

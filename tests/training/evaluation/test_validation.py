"""The command `maskrcnn eval` on a real checkpoint, in one process and in two."""

import contextlib
import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import invoke, run_main
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tiny_run import LoadTiny, load_tiny, measure, run_in_two_processes, train

from maskrcnn_trt.benchmarks.accuracy import evaluate
from maskrcnn_trt.model.losses import LOSS_NAMES
from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.training.config import ConfigError, EvaluationConfig
from maskrcnn_trt.training.curves import draw_curves
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.evaluation.drawn_images import chosen_images
from maskrcnn_trt.training.evaluation.validation import (
    ExpectationError,
    check_expected,
    reached_targets,
)
from maskrcnn_trt.training.reporting import METRICS_FILE
from maskrcnn_trt.training.run import run_training
from maskrcnn_trt.training.trainer import GpuMemoryError

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


@pytest.fixture(scope="module")
def annotations(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Annotation file with two thirds of the model's detections, so that 0 < AP < 1."""
    folder = tmp_path_factory.mktemp("truth")
    measure(tiny_checkpoint, tiny_config, folder, "evaluation.skip_eval=true")
    boxes, masks = (
        json.loads((folder / "inference" / f"{iou_type}.json").read_text())
        for iou_type in ("bbox", "segm")
    )
    content = json.loads((tiny_config.parent / "annotations/val.json").read_text())
    content["annotations"] = [
        {**box, **mask, "id": number, "iscrowd": 0, "area": float(area)}
        for number, (box, mask) in enumerate(zip(boxes, masks, strict=True), start=1)
        if number % 3 and (area := coco_mask.area(mask["segmentation"]))
    ]
    path = folder / "val.json"
    path.write_text(json.dumps(content))
    return path


_evaluate = partial(invoke, evaluate)


def _by_hand(annotations: Path, results: Path, iou_type: str) -> tuple[COCOeval, str]:
    """Evaluate with pycocotools. Return the evaluation and its printed summary."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(annotations)
        evaluation = COCOeval(truth, truth.loadRes(str(results)), iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        with contextlib.redirect_stdout(printed):
            evaluation.summarize()
    return evaluation, printed.getvalue()


@pytest.mark.slow
def test_eval_equals_pycocotools_by_hand(
    tiny_config: Path, tiny_checkpoint: Path, annotations: Path, tmp_path: Path
) -> None:
    """In one process, and in two that share five images. Only one of the two prints the error."""
    common = [
        f"data.val.annotations={annotations}", "evaluation.images_per_batch=2",
        "evaluation.expected={segm/AP: 1}",
    ]  # fmt: skip
    args = (str(tiny_checkpoint), str(tiny_config), *common)
    codes, printed_together, errors = run_in_two_processes(
        tmp_path, "eval", *args, f"output_dir={tmp_path / 'together'}"
    )
    alone = _evaluate(*args, f"output_dir={tmp_path / 'alone'}")
    assert isinstance(alone.exception, ExpectationError)
    assert codes == [1, 1]
    assert errors.count("Error: segm/AP is ") == 1
    ours, theirs = tmp_path / "alone/inference", tmp_path / "together/inference"
    measured = torch.load(ours / "coco_results.pth", weights_only=True)
    assert measured == torch.load(theirs / "coco_results.pth", weights_only=True)
    for iou_type in ("bbox", "segm"):
        name = f"{iou_type}.json"
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        expected, printed = _by_hand(annotations, ours / name, iou_type)
        assert 0.05 < expected.stats[0] < 0.95
        values = [measured[iou_type][name] for name in NAMES]
        np.testing.assert_allclose(values, expected.stats, atol=1e-6, rtol=0)
        assert printed in alone.stdout
    expected_text = alone.stdout.replace(f"{tmp_path}/alone", f"{tmp_path}/together")
    assert printed_together == expected_text


def test_predictions_equal_the_json_files(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    measure(tiny_checkpoint, tiny_config, tmp_path)
    folder = tmp_path / "inference"
    predictions = torch.load(folder / "predictions.pth", weights_only=True)
    assert [image["image_id"] for image in predictions] == [1, 2, 3, 4, 5]
    categories = json.loads((tiny_config.parent / "annotations/val.json").read_text())["categories"]
    ids = sorted(category["id"] for category in categories)
    found = [
        (image["image_id"], ids[label - 1], score, box, mask)
        for image in predictions
        for label, score, box, mask in zip(
            image["labels"].tolist(), image["scores"].tolist(), image["boxes"].tolist(),
            image["masks"], strict=True,
        )
    ]  # fmt: skip
    boxes, masks = (json.loads((folder / name).read_text()) for name in ("bbox.json", "segm.json"))
    assert len(found) == len(boxes) > 0
    for (image_id, category, score, (x1, y1, x2, y2), rle), box, mask in zip(
        found, boxes, masks, strict=True
    ):
        assert (image_id, category, score) == (box["image_id"], box["category_id"], box["score"])
        assert box["bbox"] == [x1, y1, x2 - x1, y2 - y1]
        assert rle == mask["segmentation"]


def test_skip_eval_writes_detections_only(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    args = (tiny_checkpoint, tiny_config, f"output_dir={tmp_path}")
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "coco_results.pth").touch()  # of an earlier evaluation
    printed = _evaluate(*args, "evaluation.skip_eval=true").stdout
    assert str(tmp_path / "inference") in printed
    assert "AP" not in printed
    names = {path.name for path in (tmp_path / "inference").iterdir()}
    assert names == {"bbox.json", "segm.json", "predictions.pth"}


def test_an_unreadable_image_is_ignored(
    tiny_config: Path, tiny_checkpoint: Path, annotations: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    content = json.loads(annotations.read_text())
    for path in (tiny_config.parent / "val").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    broken = content["images"][0]
    (tmp_path / broken["file_name"]).write_bytes(b"\xff\xd8 no image")
    settings = f"data.val={{images: {tmp_path}, annotations: {annotations}}}"
    metrics = measure(tiny_checkpoint, tiny_config, tmp_path, settings)
    assert "4 of the 5 images" in caplog.text
    content["images"].remove(broken)
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != broken["id"]]
    rest = tmp_path / "rest.json"
    rest.write_text(json.dumps(content))
    expected, _ = _by_hand(rest, tmp_path / "inference" / "segm.json", "segm")
    assert [metrics[f"segm/{name}"] for name in NAMES] == pytest.approx(expected.stats, abs=1e-6)


@pytest.mark.parametrize(("images", "key"), [(8, "evaluation.images"), (1, "data.min_size")])
def test_out_of_memory_names_the_key_to_lower(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, images: int, key: str,
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(MaskRCNN, "detect", fail)
    with pytest.raises(GpuMemoryError, match=rf"images per batch: {images}\); lower {key}"):
        measure(tiny_checkpoint, tiny_config, tmp_path, f"evaluation.images_per_batch={images}")


def test_the_output_folder_is_checked_before_the_evaluation(
    tiny_config: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskRCNN, "forward", lambda *_: pytest.fail("evaluated"))
    with pytest.raises(ConfigError, match=r"/proc/x.*output_dir=FOLDER"):
        measure(tiny_checkpoint, tiny_config, Path("/proc/x"))


def test_metrics_are_written_before_the_expectation_fails(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    args = [tiny_checkpoint, tiny_config, f"output_dir={tmp_path}"]
    args.append("evaluation.expected={bbox/AP: 1, segm/AP/ring: 0}")
    code, out, err = run_main(monkeypatch, capsys, "eval", *map(str, args))
    assert code == 1
    error = err.splitlines()[-1]
    assert error.startswith("Error: bbox/AP is 0.")
    assert "bbox/AP 1.0, segm/AP/ring 0.0" in error
    assert "maxDets=100" in out
    assert (tmp_path / "inference" / "coco_results.pth").is_file()


@pytest.mark.parametrize(
    ("name", "value", "fails"),
    [("bbox/AP", 0.38, False), ("bbox/AP", 0.3765, False), ("bbox/AP", 0.3755, True),
     ("bbox/AP", -1.0, True), ("segm/AP", 0.38, True)],
)  # fmt: skip
def test_expected_metrics_are_measured_within_a_tolerance(
    name: str, value: float, fails: bool
) -> None:
    settings = EvaluationConfig(expected={"bbox/AP": 0.377}, tolerance=0.001)
    with pytest.raises(ExpectationError) if fails else contextlib.nullcontext():
        check_expected(settings, {name: value})


@pytest.mark.parametrize(
    ("targets", "reached"),
    [({}, False), ({"min_bbox_ap": 0.3}, True), ({"min_bbox_ap": 0.31}, False),
     ({"min_mask_ap": 0.2}, True), ({"min_bbox_ap": 0.3, "min_mask_ap": 0.2}, True),
     ({"min_bbox_ap": 0.3, "min_mask_ap": 0.21}, False)],
)  # fmt: skip
def test_targets_must_all_be_reached(targets: dict[str, float], reached: bool) -> None:
    settings = EvaluationConfig(per_epoch=True, **targets)
    assert bool(reached_targets(settings, {"bbox/AP": 0.3, "segm/AP": 0.2})) == reached
    assert not reached_targets(settings, {})


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ("{expected: {bbox/mAP: 0.3}}", "'bbox/mAP'.*bbox/M and segm/M"),
        ("{expected: {segm/AP: 0.3}, skip_eval: true}", "skip_eval.*expected={}"),
        ("{min_mask_ap: 0.3}", "min_mask_ap .*per_epoch=true"),
    ],
)
def test_contradictory_settings_are_refused(tiny: LoadTiny, settings: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        tiny(f"evaluation={settings}")


@pytest.mark.parametrize(("count", "drawn"), [(1, 1), (3, 3), (4, 4), (9, 5)])
def test_as_many_images_are_drawn_as_set(tiny: LoadTiny, count: int, drawn: int) -> None:
    config = tiny().data.val
    assert config is not None
    records = chosen_images(CocoDataset(config), count).records
    assert len({record.id for record in records}) == len(records) == drawn


def test_losses_equal_those_of_training_on_the_same_images(
    tiny: LoadTiny, tiny_config: Path, tmp_path: Path
) -> None:
    """They differ only by the random sampling of anchors and RoIs. The weights do not change."""
    folder = tiny_config.parent
    config = tiny(
        f"data.val.annotations={folder}/annotations/train.json", f"data.val.images={folder}/train",
        "data.flip_probability=0", "solver.images_per_batch=12", "solver.base_lr=1e-9",
        "solver.max_iterations=1", "evaluation.skip_test=false", "evaluation.losses=true",
        "evaluation.images_per_batch=5", "evaluation.draw_images=3",
    )  # fmt: skip
    run_training(config)
    trained, validated = map(json.loads, (tmp_path / METRICS_FILE).read_text().splitlines())
    parts = [validated[f"val/{name}"] for name in LOSS_NAMES]
    assert validated["val/loss"] == pytest.approx(sum(parts))
    assert parts == pytest.approx([trained[name] for name in LOSS_NAMES], rel=0.2)
    with Image.open(tmp_path / "validation_images" / "0000001.png") as image:
        assert image.width > 1000
        with Image.open(tmp_path / "progress.png") as joined:  # the only drawing: 1 iteration
            assert joined.size == image.size
    with Image.open(draw_curves(tmp_path)) as image:
        assert image.format == "PNG"


def test_classes_are_matched_by_name(tiny_config: Path, tmp_path: Path) -> None:
    """Metrics and losses do not depend on the ids of the categories in the validation set."""
    source = tiny_config.parent / "annotations" / "val.json"
    content = json.loads(source.read_text())
    for category in content["categories"]:
        category["id"] = 10 - category["id"]
    for annotation in content["annotations"]:
        annotation["category_id"] = 10 - annotation["category_id"]
    (tmp_path / "other.json").write_text(json.dumps(content))
    metrics = [
        train(
            load_tiny(
                tiny_config, tmp_path / path.stem, f"data.val.annotations={path}",
                "solver.max_iterations=1", "evaluation={losses: true}",
            )
        ).metrics
        for path in (source, tmp_path / "other.json")
    ]  # fmt: skip
    assert metrics[0] == pytest.approx(metrics[1])

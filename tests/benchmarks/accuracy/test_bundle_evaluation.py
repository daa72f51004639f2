"""Metrics of a bundle, compared with those of its checkpoint."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import ExifTags, Image
from pycocotools import mask as coco_mask

from maskrcnn_trt.benchmarks.accuracy.measure import ValidationSet, evaluate_bundle
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.config import ConfigError, EvaluationConfig
from maskrcnn_trt.training.data.coco.dataset import DataError
from maskrcnn_trt.training.data.convert.layouts import LayoutSplit
from maskrcnn_trt.training.data.synthetic.dataset import SyntheticConfig, draw_dataset
from maskrcnn_trt.training.run import evaluate_checkpoint


def _measure_checkpoint(
    checkpoint: Path, data: LayoutSplit, output: Path, *overrides: str
) -> dict[str, float]:
    """Evaluate the eager model; the result files are in `output/inference`."""
    loaded = load_checkpoint(checkpoint)
    config = output / "config.yaml"
    values = {
        "output_dir": str(output),
        "device": "cpu",
        "precision": "fp32",
        "data": {
            "train": data.config.model_dump(mode="json"),
            "val": data.config.model_dump(mode="json"),
            "min_size": loaded.preprocessing.min_size,
            "max_size": loaded.preprocessing.max_size,
            "buckets": loaded.buckets,
            "workers": 0,
        },
    }
    output.mkdir(exist_ok=True)
    config.write_text(json.dumps(values))
    return evaluate_checkpoint(checkpoint, str(config), overrides)


@pytest.fixture(scope="module")
def data(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LayoutSplit:
    """Images of both orientations; two thirds of the model's own detections are ground truth."""
    folder = tmp_path_factory.mktemp("data")
    for width, height in ((200, 150), (90, 140)):
        config = SyntheticConfig(
            train=1, val=8, width=width, height=height, seed=width, classes=("circle",)
        )
        draw_dataset(folder / str(width), config)
    (folder / "val").mkdir()
    images = []
    for number, path in enumerate(sorted(folder.glob("*/val/*")), start=1):
        target = path.rename(folder / "val" / f"{number}{path.suffix}")
        with Image.open(target) as image:
            size = {"width": image.width, "height": image.height}
        images.append({"id": number, "file_name": target.name, **size})
    categories = [c.model_dump() for c in load_checkpoint(tiny_checkpoint).categories]
    content: dict[str, Any] = {"images": images, "categories": categories, "annotations": []}
    path = folder / "annotations" / "val.json"
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    split = LayoutSplit(folder / "val", path)
    _measure_checkpoint(tiny_checkpoint, split, folder / "detections")
    content["annotations"] = _ground_truth_from(folder / "detections" / "inference")
    path.write_text(json.dumps(content))
    return split


def _ground_truth_from(results: Path) -> list[dict[str, Any]]:
    boxes, masks = (json.loads((results / f"{t}.json").read_text()) for t in ("bbox", "segm"))
    return [
        {**box, **mask, "id": number, "iscrowd": int(number % 10 == 0), "area": float(area)}
        for number, (box, mask) in enumerate(zip(boxes, masks, strict=True), start=1)
        if number % 3 and (area := coco_mask.area(mask["segmentation"]))
    ]


def test_a_bundle_has_the_metrics_of_its_checkpoint(
    tiny_checkpoint: Path, bundle: Path, data: LayoutSplit, tmp_path: Path
) -> None:
    ours = evaluate_bundle(bundle, ValidationSet(data.load()), output=tmp_path / "ours")
    expected = _measure_checkpoint(tiny_checkpoint, data, tmp_path)
    assert 0.1 < expected["segm/AP"] < 0.95
    assert ours.metrics == pytest.approx(expected, abs=1e-6)
    assert (ours.images, ours.left_out) == (16, 0)
    assert (ours.backend, ours.device, ours.precision) == ("onnxruntime", "cpu", "fp32")
    theirs = tmp_path / "inference"
    names = {"bbox.json", "segm.json", "predictions.pth", "coco_results.pth"}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    first, second = (
        json.loads((folder / "bbox.json").read_text()) for folder in (tmp_path / "ours", theirs)
    )
    assert [(r["image_id"], r["category_id"]) for r in first] == [
        (r["image_id"], r["category_id"]) for r in second
    ]
    np.testing.assert_allclose([r["bbox"] for r in first], [r["bbox"] for r in second], atol=1e-3)


def test_torch_backend_has_nearly_the_metrics_of_the_checkpoint(
    tiny_checkpoint: Path, torch_bundle: Path, data: LayoutSplit, tmp_path: Path
) -> None:
    """It decodes and resizes on its device, within one level of the CPU's pixels."""
    ours = evaluate_bundle(torch_bundle, ValidationSet(data.load()), backend="torch")
    expected = _measure_checkpoint(tiny_checkpoint, data, tmp_path)
    assert ours.metrics == pytest.approx(expected, abs=0.05)
    assert (ours.images, ours.left_out, ours.backend) == (16, 0, "torch")


def _copied(data: LayoutSplit, folder: Path) -> LayoutSplit:
    """Copy the data set, so that a test can change it."""
    images, annotations = folder / "val", folder / "val.json"
    shutil.copytree(data.images, images)
    shutil.copy(data.annotations, annotations)
    return LayoutSplit(images, annotations)


def test_invalid_images_are_skipped(
    tiny_checkpoint: Path, bundle: Path, data: LayoutSplit, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One is damaged, one has another size than annotated, one is a folder, one is missing."""
    changed = _copied(data, tmp_path)
    (changed.images / "1.jpg").write_bytes(b"\xff\xd8\xff no image")
    shutil.copy(changed.images / "2.jpg", changed.images / "9.jpg")
    (changed.images / "3.jpg").unlink()
    (changed.images / "3.jpg").mkdir()
    (changed.images / "5.jpg").unlink()
    ours = evaluate_bundle(bundle, ValidationSet(changed.load()))
    assert (ours.images, ours.left_out) == (12, 4)
    for fact in (
        "1.jpg: ",
        "(Is a directory) (invalid files so far: 2)",
        "9.jpg: the image is 200x150 pixels, but annotated as 140x90",
        "5.jpg",
        "12 of the 15 images",
    ):
        assert fact in caplog.text
    expected = _measure_checkpoint(tiny_checkpoint, changed, tmp_path / "theirs")
    assert ours.metrics == pytest.approx(expected, abs=1e-6)


def test_invalid_images_can_be_errors(bundle: Path, data: LayoutSplit, tmp_path: Path) -> None:
    changed = _copied(data, tmp_path)
    (changed.images / "5.jpg").write_bytes(b"no image")
    before = set(threading.enumerate())
    with pytest.raises(DataError, match=r"5\.jpg: .*data\.on_broken=skip"):
        evaluate_bundle(bundle, ValidationSet(changed.load("refuse"), on_broken="refuse"))
    assert set(threading.enumerate()) <= before
    for path in changed.images.iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"val\.json"):
        evaluate_bundle(bundle, ValidationSet(changed.load()))


def test_other_annotations(bundle: Path, data: LayoutSplit, tmp_path: Path) -> None:
    """Without annotations, metrics are -1. Another category is an error."""
    changed = _copied(data, tmp_path)
    content = json.loads(changed.annotations.read_text())
    changed.annotations.write_text(json.dumps({**content, "annotations": []}))
    settings = EvaluationConfig(evaluator="pycocotools")
    ours = evaluate_bundle(bundle, ValidationSet(changed.load(), settings))
    assert set(ours.metrics.values()) == {-1}
    content["categories"][1]["name"] = "bowl"
    changed.annotations.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"7.*bowl.*not a class"):
        evaluate_bundle(bundle, ValidationSet(changed.load()))


@pytest.mark.parametrize("rule", ["apply", "ignore"])
def test_images_have_the_annotated_orientation(
    tiny_checkpoint: Path,
    bundle: Path,
    data: LayoutSplit,
    tmp_path: Path,
    rule: Literal["apply", "ignore"],
) -> None:
    """The size of the first shows how it was annotated; the rule decides for the second."""
    rotated = _copied(data, tmp_path)
    for name, stored, tag in (("1.jpg", Image.Transpose.ROTATE_90, 6), ("2.jpg", None, 3)):
        with Image.open(rotated.images / name) as image:
            pixels = image if stored is None else image.transpose(stored)
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = tag
            pixels.save(rotated.images / name, exif=exif)
    ours = evaluate_bundle(bundle, ValidationSet(rotated.load(), exif_orientation=rule))
    assert ours.left_out == 0
    key = f"data.exif_orientation={rule}"
    expected = _measure_checkpoint(tiny_checkpoint, rotated, tmp_path / "theirs", key)
    assert ours.metrics == pytest.approx(expected, abs=1e-6)

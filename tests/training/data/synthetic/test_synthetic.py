import json
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from tiny_run import LoadTiny

from maskrcnn_trt.cli import cli
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.commands import data
from maskrcnn_trt.training.data.synthetic.dataset import (
    SyntheticConfig,
    annotation_from_object,
    draw_dataset,
    with_synthetic_data,
)
from maskrcnn_trt.training.data.synthetic.scenes import SceneObject, draw_scene
from maskrcnn_trt.training.data.synthetic.shapes import OUTLINES, Pose, rasterize

CONFIG = SyntheticConfig(train=100, val=4, width=128, height=96, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    draw_dataset(folder, CONFIG)
    return folder


@pytest.fixture(scope="module")
def content(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "annotations/train.json").read_text())
    return content


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_equal_configurations_give_equal_files(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"train": 9, "val": 2})
    draw_dataset(tmp_path / "alone", config)
    draw_dataset(tmp_path / "together", config, workers=2)
    draw_dataset(tmp_path / "other", config.model_copy(update={"seed": 6}))
    alone = files(tmp_path / "alone")
    assert len(alone) == 9 + 2 + 2
    assert alone == files(tmp_path / "together")
    other = files(tmp_path / "other")
    assert not any(alone[name] == other[name] for name in alone)
    assert alone["train/000000.jpg"] != alone["val/000000.jpg"]


@pytest.mark.timeout(60)
def test_a_killed_worker_process_is_an_error(tmp_path: Path) -> None:
    def kill_workers() -> None:
        for child in multiprocessing.active_children():
            child.kill()

    config = CONFIG.model_copy(update={"train": 1000})
    with pytest.raises(DataError, match=r"train: a worker process was killed.*--workers 1"):
        draw_dataset(tmp_path, config, workers=2, on_image=kill_workers)


@pytest.mark.timeout(60)
def test_an_error_in_a_worker_process_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "train" / "000001.jpg").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="000001"):
        draw_dataset(tmp_path, CONFIG, workers=2)


def test_data_set_is_valid(folder: Path) -> None:
    for split, number in (("train", CONFIG.train), ("val", CONFIG.val)):
        annotations = folder / "annotations" / f"{split}.json"
        config = DatasetConfig(images=folder / split, annotations=annotations)
        dataset = CocoDataset(config, on_broken="refuse")
        assert len(dataset) == number
        assert tuple(category.name for category in dataset.categories) == CONFIG.classes
        for record in dataset.records:
            with Image.open(record.path) as image:
                assert (image.format, image.size) == ("JPEG", (record.width, record.height))


def test_data_set_holds_every_kind_of_annotation(content: dict[str, Any]) -> None:
    annotations = content["annotations"]
    assert {(i["width"], i["height"]) for i in content["images"]} == {(128, 96), (96, 128)}
    assert set(Counter(a["category_id"] for a in annotations)) == set(range(1, 8))
    crowds = [a for a in annotations if a["iscrowd"]]
    runs = [a for a in annotations if isinstance(a["segmentation"], dict)]
    pieces = [a for a in annotations if len(a["segmentation"]) > 1 and a not in runs]
    annotated = {a["image_id"] for a in annotations}
    assert crowds
    assert len(runs) > len(crowds)
    assert pieces
    assert len(annotated) < CONFIG.train
    areas = [a["area"] for a in annotations]
    assert max(areas) > 50 * min(areas)


def test_annotations_agree_with_pycocotools(folder: Path, content: dict[str, Any]) -> None:
    coco = COCO(folder / "annotations/train.json")
    for annotation in content["annotations"]:
        runs = coco.annToRLE(annotation)
        assert annotation["area"] == coco_mask.area(runs)
        assert annotation["bbox"] == coco_mask.toBbox(runs).tolist()


def test_objects_of_a_scene_do_not_overlap() -> None:
    for seed in range(20):
        scene = draw_scene(np.random.default_rng(seed), 96, 128, tuple(OUTLINES))
        assert scene.image.shape == (96, 128, 3)
        assert scene.image.dtype == np.uint8
        assert sum((o.visible for o in scene.objects), np.zeros(1)).max() <= 1 + 1e-5
        for scene_object in scene.objects:
            assert scene_object.is_crowd or np.count_nonzero(scene_object.visible > 0.5) >= 24


def coverage_of(shape: str, pose: Pose, height: int = 100, width: int = 120) -> np.ndarray:
    image = np.zeros((height, width), np.float32)
    patch = rasterize(OUTLINES[shape], pose, height, width)
    if patch is not None:
        image[patch.rows, patch.columns] = patch.coverage
    return image


def test_shapes_cover_what_geometry_says() -> None:
    pose = Pose(60, 50, 40, 0.5, 0.3)
    ellipse = np.pi * 40 * 20
    assert coverage_of("circle", pose).sum() == pytest.approx(ellipse, rel=0.02)
    assert coverage_of("ring", pose).sum() == pytest.approx(ellipse * (1 - 0.55**2), rel=0.03)
    assert coverage_of("square", pose).sum() == pytest.approx(2 * 40 * 20, rel=0.02)
    assert coverage_of("triangle", pose._replace(squeeze=1)).sum() == pytest.approx(
        3**1.5 / 4 * 40**2, rel=0.02
    )
    half = coverage_of("circle", pose._replace(x=0))
    assert half.sum() == pytest.approx(ellipse / 2, rel=0.02)
    assert not coverage_of("circle", pose._replace(x=-50)).any()


@pytest.mark.parametrize("shape", OUTLINES)
def test_segmentation_follows_coverage(shape: str) -> None:
    assert max(np.hypot(*points.T).max() for points in OUTLINES[shape]) <= 1 + 1e-9
    for x in (60, 0, 118):
        visible = coverage_of(shape, Pose(x, 50, 30, 0.8, 0.3))
        annotation = annotation_from_object(SceneObject(1, is_crowd=False, visible=visible))
        # A ring that is truncated by the image border has no hole.
        assert isinstance(annotation["segmentation"], dict) == (shape == "ring" and x == 60)
        assert annotation["area"] == pytest.approx((visible > 0.5).sum(), rel=0.03)
        rows, columns = np.nonzero(visible > 0.5)
        box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
        assert annotation["bbox"] == pytest.approx(box, abs=1)


def test_pieces_become_rings_and_crowds_run_lengths() -> None:
    visible = coverage_of("circle", Pose(60, 50, 30, 0.8, 0.3))
    visible[:, 55:65] = 0
    pieces = annotation_from_object(SceneObject(3, is_crowd=False, visible=visible))
    assert len(pieces["segmentation"]) == 2
    assert (pieces["category_id"], pieces["iscrowd"]) == (3, 0)
    crowd = annotation_from_object(SceneObject(3, is_crowd=True, visible=visible))
    assert crowd["segmentation"]["size"] == [100, 120]
    assert crowd["iscrowd"] == 1
    assert crowd["area"] == (visible > 0.5).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--size", "96"], "'96' is not WIDTHxHEIGHT in pixels"),
     (["--size", "96x16"], "from 64 to 4096 each"),
     (["--classes", "ring,blob"], "circle, square"),
     (["--classes", "ring,ring"], "circle, square"), (["--classes", ""], "circle, square"),
     (["--train", "0"], "0 is not in the range x>=1")],
)  # fmt: skip
def test_command_rejects_invalid_options(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(data, ["synthetic", str(tmp_path), *options])
    assert result.exit_code == 2
    assert message in result.output


def test_command_draws_a_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "set"
    arguments = ["synthetic", str(folder), "--train", "3", "--val", "1", "--size", "96x64"]
    options = ["--classes", "ring,star", "--workers", "1"]
    result = CliRunner().invoke(data, [*arguments, *options])
    assert result.exit_code == 0, result.output
    assert f"wrote 3 training and 1 validation images to {folder}" in result.output
    content = json.loads((folder / "annotations/train.json").read_text())
    assert [category["name"] for category in content["categories"]] == ["ring", "star"]
    assert content["images"][0] == {
        "id": 1, "file_name": "000000.jpg", "height": 64, "width": 96
    }  # fmt: skip
    again = CliRunner().invoke(data, [*arguments, *options])
    assert again.exit_code == 1
    assert "--overwrite" in again.output
    photo = folder / "train" / "photo.jpg"
    photo.touch()
    smaller = [*arguments, *options, "--train", "2", "--overwrite"]
    assert CliRunner().invoke(data, smaller).exit_code == 0
    images = {path.name for path in folder.glob("*/*.jpg")}
    assert images == {"000000.jpg", "000001.jpg", photo.name}


def test_an_interruption_leaves_no_annotations_of_other_images(tmp_path: Path) -> None:
    config = SyntheticConfig(train=2, val=1, width=96, height=64)
    draw_dataset(tmp_path, config)
    with pytest.raises(StopIteration):
        draw_dataset(
            tmp_path, config.model_copy(update={"seed": 7}), on_image=lambda: next(iter(()))
        )
    assert not list((tmp_path / "annotations").iterdir())


def test_one_allowed_core_means_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have more cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: 1 / 0)
    arguments = ["synthetic", str(tmp_path), "--train", "2", "--val", "1", "--size", "96x64"]
    assert CliRunner().invoke(data, arguments).exit_code == 0


def test_training_needs_no_data_set(tiny: LoadTiny, tiny_config: Path, tmp_path: Path) -> None:
    """Synthetic data are drawn once, also if two processes need them."""
    config = tiny()
    # Left behind by a process that was killed while drawing.
    partial = tmp_path / ".synthetic-96x64.partial" / "train" / "000000.jpg"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"half an image")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(with_synthetic_data, (config, config))
    assert first == second
    assert first.data.val is not None
    for split in (first.data.train, first.data.val):
        records = CocoDataset(split, "refuse").records
        assert {frozenset((r.height, r.width)) for r in records} == {frozenset((64, 96))}
    assert first.model_copy(update={"data": config.data}) == config
    image = first.data.train.images / "000000.jpg"
    drawn = image.stat().st_mtime_ns
    extra = "data.extra_train=[{images: none, annotations: none}]"
    alone = with_synthetic_data(tiny("data.val=null", extra)).data
    assert (alone.val, alone.extra_train) == (None, ())

    nothing = "data.train={images: none, annotations: none}"
    arguments = ("train", "--use-synthetic-data", str(tiny_config), f"output_dir={tmp_path}")
    overrides = (nothing, "solver.max_iterations=1")
    result = CliRunner().invoke(cli, [*arguments, *overrides], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(load_checkpoint(tmp_path / "model_final.pth").categories) > 1
    assert image.stat().st_mtime_ns == drawn

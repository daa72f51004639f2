"""The same images in five layouts, compared with pycocotools and Pillow on the outlines."""

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from layout_folders import (
    NAMES,
    TRAIN,
    VAL,
    WRITERS,
    assert_same,
    coco_content,
    save_images,
    write_json,
)

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError, read_json
from maskrcnn_trt.training.data.convert.command import convert
from maskrcnn_trt.training.data.convert.layouts import recognize_layout
from maskrcnn_trt.training.data.inspect.command import inspect
from maskrcnn_trt.training.data.inspect.report import inspect_splits


@pytest.mark.parametrize("name", WRITERS)
def test_images_classes_and_masks_are_those_of_the_scenes(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path, TRAIN, VAL)
    layout = recognize_layout(tmp_path)
    assert name in layout.name
    loaded = {split: layout.splits[split].load("refuse") for split in layout.splits}
    if len(loaded) == 1:
        (dataset,) = loaded.values()
        assert_same(dataset, [*TRAIN, *VAL])
    else:
        train, val = loaded.values()
        assert_same(train, TRAIN)
        assert_same(val, VAL)
    for dataset in loaded.values():
        assert tuple(category.name for category in dataset.categories) == NAMES
        assert not dataset.repairs


@pytest.mark.parametrize("prefix", ["", "train/", "images/train/"])
def test_images_of_cvat_are_found_wherever_its_versions_write_them(
    tmp_path: Path, prefix: str
) -> None:
    save_images(tmp_path / "images" / "train", TRAIN)
    content = coco_content(TRAIN, prefix=prefix)
    write_json(tmp_path / "annotations" / "instances_default.json", content)
    assert_same(recognize_layout(tmp_path).splits["default"].load("refuse"), TRAIN)


def test_splits_of_cvat_have_their_own_image_folders(tmp_path: Path) -> None:
    for split, scenes in (("Train", TRAIN), ("Validation", VAL)):
        save_images(tmp_path / "images" / split, scenes)
        write_json(tmp_path / "annotations" / f"instances_{split}.json", coco_content(scenes))
    layout = recognize_layout(tmp_path)
    assert_same(layout.splits["Train"].load("refuse"), TRAIN)
    assert_same(layout.splits["Validation"].load("refuse"), VAL)


def test_odd_categories_of_roboflow_are_errors_or_ignored(tmp_path: Path) -> None:
    WRITERS["Roboflow"](tmp_path, TRAIN, VAL)
    path = tmp_path / "train" / "_annotations.coco.json"
    content = read_json(path)
    content["categories"][1]["supercategory"] = ["parts"]
    path.write_text(json.dumps(content))
    assert_same(recognize_layout(tmp_path).splits["train"].load("refuse"), TRAIN)


@pytest.mark.parametrize("path", ["", "labels.json"])
def test_one_coco_file_beside_its_images_is_a_data_set(tmp_path: Path, path: str) -> None:
    save_images(tmp_path, TRAIN)
    write_json(tmp_path / "labels.json", coco_content(TRAIN))
    assert_same(recognize_layout(tmp_path / path).splits["labels"].load("refuse"), TRAIN)


@pytest.mark.parametrize("folders", [("images", "images"), ("train", "val")])
def test_coco_files_beside_the_image_folders_are_splits(
    tmp_path: Path, folders: tuple[str, str]
) -> None:
    for number in range(7):
        write_json(tmp_path / f"a{number}.json", {"notes": []})
    for split, folder, scenes in zip(("train", "val"), folders, (TRAIN, VAL), strict=True):
        save_images(tmp_path / folder, scenes)
        write_json(tmp_path / f"{split}.json", coco_content(scenes))
    splits = recognize_layout(tmp_path).splits
    assert splits.keys() == {"train", "val"}
    assert_same(splits["train"].load("refuse"), TRAIN)
    assert_same(splits["val"].load("refuse"), VAL)


def test_a_coco_file_without_images_is_left_out(tmp_path: Path) -> None:
    """The split `val` does not take the images of `train` that have the same names."""
    save_images(tmp_path / "train", TRAIN)
    for split in ("train", "val"):
        write_json(tmp_path / f"{split}.json", coco_content(TRAIN))
    assert recognize_layout(tmp_path).splits.keys() == {"train"}


@pytest.mark.parametrize("damaged", ["train", "val"])
def test_a_damaged_file_beside_the_image_folders_is_an_error(tmp_path: Path, damaged: str) -> None:
    """Otherwise, the other split would be used for both training and evaluation."""
    for split, scenes in (("train", TRAIN), ("val", VAL)):
        save_images(tmp_path / split, scenes)
        write_json(tmp_path / f"{split}.json", coco_content(scenes))
    (tmp_path / f"{damaged}.json").write_text('{"images": [')
    with pytest.raises(DataError, match=rf"{damaged}\.json is not JSON"):
        recognize_layout(tmp_path)


@pytest.mark.parametrize("name", WRITERS)
def test_converted_files_hold_the_same(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "data", TRAIN, VAL)
    out = tmp_path / "coco"
    result = CliRunner().invoke(convert, ["auto", str(tmp_path / "data"), str(out)])
    assert result.exit_code == 0, result.output
    assert name in result.output
    keys = dict(re.findall(r"data\.\w+\.(\w+)=(\S+)", result.output.splitlines()[1]))
    dataset = CocoDataset(DatasetConfig(**keys), on_broken="refuse")
    assert {r.path.name for r in dataset.records} >= {scene.name for scene in TRAIN}
    assert sum(len(coco["annotations"]) for coco in map(read_json, out.iterdir())) == sum(
        len(scene.objects) for scene in (*TRAIN, *VAL)
    )
    again = CliRunner().invoke(convert, ["auto", str(tmp_path / "data"), str(out)])
    assert isinstance(again.exception, DataError)
    # A file of an earlier conversion must not hold the same images as the new files.
    new = next(out.iterdir())
    older = out / "testing.json"
    older.write_bytes(new.read_bytes())
    arguments = ["auto", str(tmp_path / "data"), str(out), "--overwrite"]
    before = new.stat()
    refused = CliRunner().invoke(convert, arguments).exception
    assert isinstance(refused, DataError)
    assert str(older) in str(refused)
    assert new.stat() == before
    older.unlink()
    assert CliRunner().invoke(convert, arguments).exit_code == 0


def test_annotations_of_labelme_are_not_overwritten(tmp_path: Path) -> None:
    WRITERS["LabelMe"](tmp_path, TRAIN, [])
    file = next(tmp_path.rglob("*.json"))
    annotations = file.rename(file.with_name("all.json")).read_bytes()
    out = str(file.parent)
    result = CliRunner().invoke(convert, ["auto", str(tmp_path), out, "--overwrite"])
    assert "all.json is an annotation file of LabelMe" in result.output
    assert file.with_name("all.json").read_bytes() == annotations


@pytest.mark.parametrize("name", ["LabelMe", "YOLO"])
def test_inspect_reads_the_same_layouts(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "data", TRAIN, VAL)
    report = tmp_path / "report.json"
    result = CliRunner().invoke(inspect, [str(tmp_path / "data"), "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert name in result.output
    content = read_json(report)
    assert sum(split["images"] for split in content["splits"].values()) == len([*TRAIN, *VAL])
    assert content["files"] == {}


def test_unreadable_images_of_yolo_are_not_unlisted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["YOLO"](tmp_path, TRAIN, VAL)
    (tmp_path / "train" / "images" / TRAIN[0].name).write_bytes(b"no picture")
    monkeypatch.chdir(tmp_path)
    splits = {name: split.load() for name, split in recognize_layout(Path()).splits.items()}
    assert not inspect_splits(splits, min_size=64, max_size=96).files


def test_other_files_around_the_data_set_are_ignored(tmp_path: Path) -> None:
    WRITERS["COCO"](tmp_path / "data", TRAIN, VAL)
    (tmp_path / "notes.json").write_text("// not JSON")
    assert recognize_layout(tmp_path).name == "COCO"


def test_a_folder_around_the_data_set_is_skipped(tmp_path: Path) -> None:
    WRITERS["Roboflow"](tmp_path / "download" / "parts", TRAIN, VAL)
    (tmp_path / "download" / "README.txt").touch()
    (tmp_path / "runs").mkdir()
    assert set(recognize_layout(tmp_path).splits) == {"train", "valid"}


def test_unknown_folders_are_errors_that_name_the_layouts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"COCO.*Roboflow.*CVAT.*LabelMe.*YOLO"):
        recognize_layout(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        recognize_layout(tmp_path / "nowhere")


@pytest.mark.timeout(60)
def test_a_pipe_is_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is not a folder; give the folder"):
        recognize_layout(tmp_path / "pipe")

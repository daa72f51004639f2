"""YOLO folders: paths in data.yaml, label files and their errors."""

from pathlib import Path

import pytest
from layout_folders import NAMES, TRAIN, VAL, assert_same, write_yolo
from PIL import Image

from maskrcnn_trt.training.data.coco.dataset import DataError
from maskrcnn_trt.training.data.convert.layouts import recognize_layout

NAMES_LINE = f"names: [{', '.join(NAMES)}]\n"


def yolo_folder(folder: Path, text: str) -> Path:
    write_yolo(folder, TRAIN, VAL)
    (folder / "data.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "path: .\ntrain: train/images\nval: valid/images\nnames: " + str(dict(enumerate(NAMES))),
        "path: /content/gone\ntrain: train\nval: valid\n" + NAMES_LINE,
        "train: /content/gone/train/images\nval: [valid/images]\n" + NAMES_LINE,
        "train: train.txt\nval: ./valid/images/\n" + NAMES_LINE,
    ],
)
def test_paths_of_yolo_are_found(tmp_path: Path, text: str) -> None:
    yolo_folder(tmp_path, text)
    lines = (f"./train/images/{scene.name}\n" for scene in TRAIN)
    (tmp_path / "train.txt").write_text("".join(lines))
    for path in (tmp_path, tmp_path / "data.yaml"):
        splits = recognize_layout(path).splits
        assert_same(splits["train"].load("refuse"), TRAIN)
        assert_same(splits["val"].load("refuse"), VAL)


def test_folders_by_kind_are_found(tmp_path: Path) -> None:
    write_yolo(tmp_path / "old", TRAIN, VAL)
    for kind in ("images", "labels"):
        for split in ("train", "valid"):
            (tmp_path / kind).mkdir(exist_ok=True)
            (tmp_path / "old" / split / kind).rename(tmp_path / kind / split)
    text = "train: images/train\nval: images/valid\n" + NAMES_LINE
    (tmp_path / "mine.yml").write_text(text)
    assert_same(recognize_layout(tmp_path).splits["train"].load("refuse"), TRAIN)


def test_invalid_labels_of_yolo_are_named(tmp_path: Path) -> None:
    write_yolo(tmp_path, TRAIN, VAL)
    label = tmp_path / "train" / "labels" / "photo_000.txt"
    lines = [
        "0 0.5 0.5 0.2 0.2",
        "9 0 0 1 0 1 1",
        "a 0 0 1 0 1 1",
        "",
        "0 0 0 1 0 1",
        "1 nan 0" * 3,
        "0 0 0 1e9 0 1 1",
    ]
    # A byte order mark, as Notepad writes it.
    label.write_text(label.read_text() + "\n".join(lines), "utf-8-sig")
    (tmp_path / "train" / "images" / "photo_001.jpg").write_bytes(b"no image")
    with Image.open(tmp_path / "train" / "images" / "photo_002.jpg") as image:
        image.save(tmp_path / "train" / "images" / "photo_005.gif")
    dataset = recognize_layout(tmp_path).splits["train"].load()
    assert {reason: names for reason, names in dataset.faults.items() if "label" in reason} == {
        "labels: box without an outline": ("photo_000.txt:2",),
        "labels: unknown class": ("photo_000.txt:3",),
        "labels: not a class and numbers": ("photo_000.txt:4", "photo_000.txt:7"),
        "labels: coordinates far outside the image": ("photo_000.txt:8",),
        "labels: polygon of fewer than three points, or without a last y": ("photo_000.txt:6",),
    }
    others = ("photo_001.jpg", "photo_005.gif")
    assert dataset.faults["images: not a JPEG, PNG, WebP, BMP or TIFF image"] == others
    assert len(dataset.records[0].objects) == len(TRAIN[0].objects)


def test_images_without_labels_have_no_objects(tmp_path: Path) -> None:
    write_yolo(tmp_path, TRAIN, VAL)
    (tmp_path / "train" / "labels" / "photo_000.txt").unlink()
    assert not recognize_layout(tmp_path).splits["train"].load("refuse").records[0].objects


def test_labels_of_yolo_refer_to_the_upright_image(tmp_path: Path) -> None:
    write_yolo(tmp_path, TRAIN, VAL)
    path = tmp_path / "train" / "images" / "photo_000.jpg"
    with Image.open(path) as image:
        exif = image.getexif()
        exif[0x0112] = 6
        image.load()
        image.save(path, exif=exif)
    record = recognize_layout(tmp_path).splits["train"].load("refuse").records[0]
    assert (record.height, record.width) == (TRAIN[0].width, TRAIN[0].height)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: nowhere\nnames: [a]\n", "no images found for train: nowhere"),
        # The validation images must not become the training images.
        ("train: nowhere\nval: val/images\nnames: [a]\n", "no images found for train: nowhere"),
        ("train: train/images\nnames: 3\n", "`names` must be"),
        ("train: train/images\n", "`names` must be"),
        ("names: [a\n", "is not YAML"),
        (f"train: {'x' * 5000}\nnames: [a]\n", "no images found for train: xxx"),
    ],
)
def test_incomplete_yaml_files_are_errors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        recognize_layout(yolo_folder(tmp_path, text))

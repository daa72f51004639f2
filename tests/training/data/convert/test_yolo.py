"""YOLO folders: paths in data.yaml, label files and their errors."""

import shutil
from pathlib import Path

import pytest
from layout_folders import NAMES, TRAIN, VAL, Scene, assert_same, write_yolo
from PIL import Image

from maskrcnn_trt.training.data.coco.dataset import DataError
from maskrcnn_trt.training.data.convert.layouts import recognize_layout

NAMES_LINE = f"names: [{', '.join(NAMES)}]\n"


def yolo_folder(folder: Path, text: str) -> Path:
    write_yolo(folder, TRAIN, VAL)
    (folder / "data.yaml").write_text(text)
    return folder


def write_by_kind(folder: Path, splits: dict[str, list[Scene]]) -> None:
    """Write `images/SPLIT` and `labels/SPLIT`, without a YAML file."""
    for name, scenes in splits.items():
        write_yolo(folder / "new", scenes, [])
        for kind in ("images", "labels"):
            (folder / kind / name).mkdir(parents=True, exist_ok=True)
            for path in (folder / "new" / "train" / kind).iterdir():
                path.rename(folder / kind / name / path.name)
        shutil.rmtree(folder / "new")


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


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("[no, yes]", ["no", "yes"]),
        ("[off, 'on', 1e3, 2024-01-01, null]", ["off", "on", "1e3", "2024-01-01", "null"]),
        ("{1: y, 0: n}", ["n", "y"]),
        ("{<<: {!!int 0: no}, 1: yes}", ["no", "yes"]),
        ("{'0': bolt, \"10\": gear, 2: nut}", ["bolt", "nut", "gear"]),
    ],
)
def test_names_are_text(tmp_path: Path, names: str, expected: list[str]) -> None:
    folder = yolo_folder(tmp_path, f"train: train/images\nnames: {names}\n")
    categories = recognize_layout(folder).splits["train"].load().categories
    assert [category.name for category in categories] == expected


def test_another_number_of_classes_than_names_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = yolo_folder(tmp_path, f"train: train/images\nnc: 4\n{NAMES_LINE}")
    recognize_layout(folder)
    assert not caplog.text
    (folder / "data.yaml").write_text(f"train: train/images\nnc: 5\n{NAMES_LINE}")
    assert_same(recognize_layout(folder).splits["train"].load(), TRAIN)
    assert "nc is 5" in caplog.text
    assert "4 names" in caplog.text


def test_folders_by_kind_are_found(tmp_path: Path) -> None:
    write_by_kind(tmp_path, {"train": TRAIN, "valid": VAL})
    text = "train: images/train\nval: images/valid\n" + NAMES_LINE
    (tmp_path / "mine.yml").write_text(text)
    assert_same(recognize_layout(tmp_path).splits["train"].load("refuse"), TRAIN)


def test_images_behind_symbolic_links_are_found(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_yolo(tmp_path / "other", TRAIN, VAL)
    for kind in ("images", "labels"):
        (data / kind).mkdir(parents=True)
        (data / kind / "part").symlink_to(tmp_path / "other" / "train" / kind)
        (data / kind / "loop").symlink_to(data)
    (data / "data.yaml").write_text("train: images\n" + NAMES_LINE)
    dataset = recognize_layout(data).splits["train"].load("refuse")
    assert_same(dataset, TRAIN)
    assert {record.path.parent for record in dataset.records} == {data / "images" / "part"}


@pytest.mark.parametrize(
    "text",
    [
        "train: [images/train, images/val]\nval: images/val\n",
        "train: images\nval: images/val\n",
        "train: train.txt\nval: val.txt\n",
        # Absolute and relative paths of the same images.
        "train: [{folder}/images/val, images/train, images/val]\nval: {folder}/images/val\n",
    ],
)
def test_images_of_two_splits_keep_their_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    write_by_kind(tmp_path / "data", {"train": TRAIN, "val": VAL})
    (tmp_path / "data" / "data.yaml").write_text(text.format(folder=tmp_path / "data") + NAMES_LINE)
    for name, parts in (("train", {"train": TRAIN, "val": VAL}), ("val", {"val": VAL})):
        lines = [f"images/{part}/{one.name}\n" for part, scenes in parts.items() for one in scenes]
        (tmp_path / "data" / f"{name}.txt").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    splits = recognize_layout(Path("data")).splits
    assert_same(splits["train"].load("refuse"), [*TRAIN, *VAL])
    assert_same(splits["val"].load("refuse"), VAL)
    assert "train and val share 2 images" in caplog.text


def test_equal_names_in_nested_folders_keep_their_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nested = [scene._replace(name=outer.name) for scene, outer in zip(VAL, TRAIN[:2], strict=True)]
    write_by_kind(tmp_path, {"": TRAIN[:2], "val": nested})
    (tmp_path / "data.yaml").write_text("train: images\nval: images/val\n" + NAMES_LINE)
    splits = recognize_layout(tmp_path).splits
    records = splits["train"].load("refuse").records
    names = [record.path.relative_to(tmp_path / "images").as_posix() for record in records]
    inner = [f"val/{scene.name}" for scene in nested]
    assert names == [*(scene.name for scene in TRAIN[:2]), *inner]
    expected = [len(scene.objects) for scene in (*TRAIN[:2], *nested)]
    assert [len(record.objects) for record in records] == expected
    assert_same(splits["val"].load("refuse"), nested)


def test_missing_folders_and_listed_images_are_left_out(tmp_path: Path) -> None:
    write_by_kind(tmp_path, {"train": TRAIN, "val": VAL})
    (tmp_path / "data.yaml").write_text(
        "train: [images/train, images/extra, images/void]\nval: val.txt\n" + NAMES_LINE
    )
    (tmp_path / "images" / "void").mkdir()
    names = ("images/val/gone_0.jpg", "images/val/gone_1.jpg")
    listed = (*(f"images/val/{scene.name}" for scene in VAL), "", *names)
    # With a byte order mark, as editors on Windows write it.
    (tmp_path / "val.txt").write_text("\n".join(listed), "utf-8-sig")
    splits = recognize_layout(tmp_path).splits
    train, val = splits["train"].load(), splits["val"].load()
    assert_same(train, TRAIN)
    assert_same(val, VAL)
    assert train.faults == {
        "images: folder or list missing or empty": ("images/extra", "images/void")
    }
    assert val.faults == {"images: file missing": names}


@pytest.mark.parametrize("flat", [False, True])
def test_labels_without_image_are_left_out(tmp_path: Path, flat: bool) -> None:
    write_by_kind(tmp_path, {"train": TRAIN, "val": VAL})
    kinds = ("images", "images") if flat else ("images", "labels")
    if flat:
        for path in (tmp_path / "labels" / "train").iterdir():
            path.rename(tmp_path / "images" / "train" / path.name)
    folders = [tmp_path / kind / "train" for kind in kinds]
    for scene in TRAIN[:2]:
        (folders[0] / scene.name).unlink()
    (folders[1] / "classes.txt").write_text("\n".join(NAMES))
    (folders[1] / "digits.txt").write_text("0\n1\n")
    # The labels of an image of no split.
    Image.new("RGB", (8, 8)).save(folders[0] / "unused.png")
    (folders[1] / "unused.txt").write_text("0 0 0 1 0 1 1\n")
    for name, scenes in (("train", TRAIN[2:4]), ("val", TRAIN[4:])):
        lines = (f"images/train/{scene.name}\n" for scene in scenes)
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    (tmp_path / "data.yaml").write_text("train: train.txt\nval: val.txt\n" + NAMES_LINE)
    splits = recognize_layout(tmp_path).splits
    names = tuple(f"{kinds[1]}/train/{Path(scene.name).stem}.txt" for scene in TRAIN[:2])
    assert splits["train"].load().faults == {"files: image missing": names}
    assert not splits["val"].load().faults


def test_invalid_labels_of_yolo_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    for name in ("._photo_000.jpg", "._photo_005.gif"):  # macOS writes such files
        (tmp_path / "train" / "images" / name).touch()
    dataset = recognize_layout(tmp_path).splits["train"].load()
    assert {reason: names for reason, names in dataset.faults.items() if "label" in reason} == {
        "labels: box without an outline": ("train/labels/photo_000.txt:2",),
        "labels: unknown class": ("train/labels/photo_000.txt:3",),
        "labels: not a class number followed by coordinates": (
            "train/labels/photo_000.txt:4",
            "train/labels/photo_000.txt:7",
        ),
        "labels: coordinates far outside the image": ("train/labels/photo_000.txt:8",),
        "labels: polygon of fewer than three points, or with an odd number of coordinates": (
            "train/labels/photo_000.txt:6",
        ),
    }
    others = ("train/images/photo_001.jpg", "train/images/photo_005.gif")
    reason = "header not readable: the file is not a JPEG, PNG, WebP, BMP or TIFF image"
    assert dataset.faults[f"images: {reason}"] == others
    assert len(dataset.records[0].objects) == len(TRAIN[0].objects)
    objects = sum(len(record.objects) for record in dataset.records)
    assert f"; 6 of {objects + 6} annotations are skipped" in caplog.text


def test_images_without_labels_have_no_objects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_yolo(tmp_path, TRAIN, VAL)
    recognize_layout(tmp_path)
    assert not caplog.text
    (tmp_path / "train" / "labels" / "photo_000.txt").unlink()
    shutil.rmtree(tmp_path / "valid" / "labels")
    recognize_layout(tmp_path)
    assert "1 of 5 images of train; looked for train/labels/photo_000.txt" in caplog.text
    assert "2 of 2 images of val; looked for valid/labels/val_photo_000.txt" in caplog.text
    assert "data.keep_empty=true" in caplog.text
    assert not recognize_layout(tmp_path).splits["train"].load("refuse").records[0].objects


@pytest.mark.parametrize(
    ("images", "labels", "suffix"),
    [
        ("images", None, ""),
        ("images", "annots", ".txt"),
        ("Images", "Labels", ".txt"),
        ("images", "labels", ".TXT"),
    ],
)
def test_training_images_without_any_label_file_are_an_error(
    tmp_path: Path, images: str, labels: str | None, suffix: str
) -> None:
    write_by_kind(tmp_path, {"train": TRAIN, "val": VAL})
    (tmp_path / "images").rename(tmp_path / images)
    if labels is None:
        shutil.rmtree(tmp_path / "labels")
    else:
        (tmp_path / "labels").rename(tmp_path / labels)
        for path in (tmp_path / labels / "train").iterdir():
            path.rename(path.with_suffix(suffix))
    (tmp_path / "data.yaml").write_text(f"train: {images}/train\nval: {images}/val\n{NAMES_LINE}")
    with pytest.raises(DataError, match=r"5 of 5 images.*looked for labels/train/photo_000\.txt"):
        recognize_layout(tmp_path)


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
        ("train: train/images\nnames: 3\n", "`names` must be.*'3'"),
        ("train: train/images\nnames: bolt\n", "`names` must be.*'bolt'"),
        ("train: train/images\nnames: []\n", r"`names` must be.*\[\]"),
        ("train: train/images\nnames: {a: bolt}\n", "`names` must be.*'a': 'bolt'"),
        (f"train: train/images\nnames: {{{2**63}: bolt}}\n", f"`names` must be.*{2**63}"),
        ("train: train/images\nnames: [[bolt]]\n", r"`names` must be.*\[\['bolt'\]\]"),
        ("train: train/images\nnames: {0: a, [1]: b}\n", "YAML"),
        ("train: train/images\n", "`names` must be.*missing"),
        ("names: [a\n", "is not YAML"),
        (f"train: {'x' * 5000}\nnames: [a]\n", "no images found for train: xxx"),
    ],
)
def test_incomplete_yaml_files_are_errors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        recognize_layout(yolo_folder(tmp_path, text))

import json
import shutil
from pathlib import Path

import pytest

from maskrcnn_trt.training.data.coco.dataset import DataError
from maskrcnn_trt.training.data.coco.splits import find_splits
from maskrcnn_trt.training.data.convert.layouts import find_validation_split


def create(folder: Path, *names: str) -> None:
    """Create empty files, and folders for the names that end with a slash."""
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        (
            ("annotations/train.json", "annotations/val.json", "train/", "val/"),
            {"train": "train", "val": "val"},
        ),
        (
            ("annotations/captions_val2017.json", "annotations/instances_train2017.json",
             "annotations/instances_val2017.json", "val2017/"),
            {"val2017": "val2017"},
        ),
        (
            ("annotations/instances_minival2014.json", "annotations/instances_train2014.json",
             "annotations/instances_valminusminival2014.json", "train2014/", "val2014/", "2014/"),
            {"minival2014": "val2014", "train2014": "train2014",
             "valminusminival2014": "val2014"},
        ),
        (("annotations/instances_default.json", "images/"), {"default": "images"}),
    ],
    ids=["own names", "COCO 2017", "parts of a folder", "one folder"],
)  # fmt: skip
def test_splits_are_those_with_a_folder(
    tmp_path: Path, names: tuple[str, ...], folders: dict[str, str]
) -> None:
    create(tmp_path, *names)
    configs = find_splits(tmp_path)
    assert {split: config.images for split, config in configs.items()} == {
        split: tmp_path / folder for split, folder in folders.items()
    }
    for split, config in configs.items():
        assert config.annotations.stem.removeprefix("instances_") == split


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        (("train/0.jpg", "valid/0.jpg"), {"train": "train", "val": "valid"}),
        (("train/0.jpg",), {"train": "train"}),
        # On Linux, `0.JPG` is another file.
        (("train/0.JPG", "val/0.jpg"), {"train": "train", "val": "val"}),
        (("train/0.jpg", "annotations/._train.json"), {"train": "train"}),
        (("images/train/0.jpg",), {"train": "train"}),
    ],
    ids=["another name", "no folder", "another suffix", "file of a Mac", "common folder"],
)
def test_a_split_does_not_take_the_images_of_another(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    names: tuple[str, ...],
    folders: dict[str, str],
) -> None:
    create(tmp_path, *names)
    (tmp_path / "annotations").mkdir(exist_ok=True)
    for split in ("train", "val"):
        text = '{"images": [{"file_name": "0.jpg"}]}'
        (tmp_path / "annotations" / f"{split}.json").write_text(text)
    configs = find_splits(tmp_path)
    assert {split: config.images.name for split, config in configs.items()} == folders
    assert ("val.json" in caplog.text) == ("val" not in folders)


@pytest.mark.parametrize("split", ["valid", "validation", "Val"])
def test_a_folder_may_have_a_synonym_of_the_split(tmp_path: Path, split: str) -> None:
    """Both folders hold a file of the same name."""
    create(tmp_path, "train/0.jpg", "val/0.jpg", "annotations/")
    for name in ("train", split):
        text = '{"images": [{"file_name": "0.jpg"}]}'
        (tmp_path / "annotations" / f"{name}.json").write_text(text)
    assert find_splits(tmp_path)[split].images == tmp_path / "val"


@pytest.mark.parametrize("name", ["train", "val"])
def test_the_data_set_folder_may_have_the_name_of_a_split(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    create(folder, "0.jpg", "annotations/")
    text = '{"images": [{"file_name": "0.jpg"}]}'
    (folder / "annotations/train.json").write_text(text)
    assert find_splits(folder)["train"].images == folder


def test_splits_may_share_a_folder(tmp_path: Path) -> None:
    """`maskrcnn data split` writes such files."""
    create(tmp_path, "train/0.jpg", "train/1.jpg", "annotations/")
    for split, name in (("train", "0.jpg"), ("val", "1.jpg")):
        text = f'{{"images": [{{"file_name": "{name}"}}]}}'
        (tmp_path / "annotations" / f"{split}.json").write_text(text)
    assert {config.images.name for config in find_splits(tmp_path).values()} == {"train"}


def test_ignored_annotations_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = (
        "instances_train.json", "train.json", "val.json", "captions_train.json",
        "._instances_val.json",
    )  # fmt: skip
    create(tmp_path, "train/", "val/", *(f"annotations/{name}" for name in names))
    assert find_splits(tmp_path).keys() == {"train"}
    assert [record.args[0] for record in caplog.records] == [tmp_path / "annotations" / "val.json"]


def test_two_folders_with_the_same_names_are_refused(tmp_path: Path) -> None:
    create(tmp_path, "photos/0.jpg", "detections/0.jpg", "annotations/")
    file = tmp_path / "annotations" / "all.json"
    file.write_text('{"images": [{"id": 1, "file_name": "0.jpg"}]}')
    with pytest.raises(DataError, match=r"detections and .*photos"):
        find_splits(tmp_path)
    shutil.rmtree(tmp_path / "detections")
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    assert find_splits(tmp_path)["all"].images.samefile(tmp_path / "photos")
    (tmp_path / "photos").rename(tmp_path / "images")
    assert find_splits(tmp_path)["all"].images == tmp_path / "images"


def test_folders_of_another_layout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"annotations/\*\.json"):
        find_splits(tmp_path)
    create(tmp_path, "annotations/train.json", "annotations/val.json", "pictures/")
    with pytest.raises(DataError, match="images/, train/, val/; move or link the images"):
        find_splits(tmp_path)


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [(("all",), "all"), (("train", "val"), "val"), (("test", "train2017", "val2017"), "val2017"),
     (("Train", "Valid"), "Valid"), (("Val", "minival"), "Val"),
     (("minival", "val"), "val"), (("test", "train"), None),
     (("train", "val_day", "val_night"), None)],
)  # fmt: skip
def test_the_validation_split_is_chosen(
    tmp_path: Path, splits: tuple[str, ...], chosen: str | None
) -> None:
    create(tmp_path, *(f"annotations/{s}.json" for s in splits), *(f"{s}/" for s in splits))
    if chosen:
        assert find_validation_split(tmp_path).config == find_splits(tmp_path)[chosen]
    else:
        with pytest.raises(DataError, match=f"{', '.join(splits)}.*--images"):
            find_validation_split(tmp_path)


@pytest.mark.parametrize(
    ("listed", "actual"), [("\u00e9.jpg", "e\u0301.jpg"), ("a\\b.jpg", "a/b.jpg")]
)
def test_image_folder_is_recognised_by_names_in_another_form(
    tmp_path: Path, listed: str, actual: str
) -> None:
    create(tmp_path, "annotations/train.json", "other/", f"photos/{actual}")
    content = json.dumps({"images": [{"file_name": listed}]})
    (tmp_path / "annotations" / "train.json").write_text(content)
    assert find_splits(tmp_path)["train"].images == tmp_path / "photos"

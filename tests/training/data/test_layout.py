from pathlib import Path

import pytest

from maskrcnn_trt.training.data.coco import DataError
from maskrcnn_trt.training.data.layout import find_splits, find_validation_split


def lay_out(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("annotations/train.json", "annotations/val.json", "train/", "val/"), ("train", "val")),
        (
            (
                "annotations/captions_val2017.json",
                "annotations/instances_train2017.json",
                "annotations/instances_val2017.json",
                "val2017/",
            ),
            ("val2017",),
        ),
    ],
)
def test_splits_are_those_with_a_folder(
    tmp_path: Path, names: tuple[str, ...], splits: tuple[str, ...]
) -> None:
    lay_out(tmp_path, *names)
    found = find_splits(tmp_path)
    assert tuple(found) == splits
    for split, config in found.items():
        assert config.images == tmp_path / split
        assert config.annotations.stem.removeprefix("instances_") == split


def test_a_split_may_be_part_of_a_folder(tmp_path: Path) -> None:
    files = [f"annotations/instances_{n}2014.json" for n in ("minival", "valminusminival", "train")]
    lay_out(tmp_path, *files, "train2014/", "val2014/", "2014/")
    assert {split: config.images.name for split, config in find_splits(tmp_path).items()} == {
        "minival2014": "val2014",
        "train2014": "train2014",
        "valminusminival2014": "val2014",
    }


def test_images_may_be_in_one_folder(tmp_path: Path) -> None:
    lay_out(tmp_path, "annotations/instances_default.json", "images/")
    assert find_splits(tmp_path)["default"].images == tmp_path / "images"


def test_folders_of_another_layout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no annotations/\*\.json; .*--images"):
        find_splits(tmp_path)
    lay_out(tmp_path, "annotations/train.json", "annotations/val.json", "pictures/")
    with pytest.raises(DataError, match=r"no folder train/ or val/; .*--images"):
        find_splits(tmp_path)


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [
        (("all",), "all"),
        (("train", "val"), "val"),
        (("test", "train2017", "val2017"), "val2017"),
        (("minival", "val"), "val"),
    ],
)
def test_the_validation_split_is_chosen(
    tmp_path: Path, splits: tuple[str, ...], chosen: str
) -> None:
    lay_out(tmp_path, *(f"annotations/{s}.json" for s in splits), *(f"{s}/" for s in splits))
    assert find_validation_split(tmp_path) == find_splits(tmp_path)[chosen]


@pytest.mark.parametrize("splits", [("test", "train"), ("train", "val_day", "val_night")])
def test_a_validation_split_that_does_not_stand_out_must_be_named(
    tmp_path: Path, splits: tuple[str, ...]
) -> None:
    lay_out(tmp_path, *(f"annotations/{s}.json" for s in splits), *(f"{s}/" for s in splits))
    with pytest.raises(DataError, match=f"has the splits {', '.join(splits)}; name the one"):
        find_validation_split(tmp_path)

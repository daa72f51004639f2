from pathlib import Path

import pytest

from maskrcnn_trt.training.data.coco.dataset import DataError
from maskrcnn_trt.training.data.coco.splits import find_splits, find_validation_split


def create(folder: Path, *names: str) -> None:
    """Create empty files, and folders for the names that end with a slash."""
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
    create(tmp_path, *names)
    configs = find_splits(tmp_path)
    assert tuple(configs) == splits
    for split, config in configs.items():
        assert config.images == tmp_path / split
        assert config.annotations.stem.removeprefix("instances_") == split


def test_a_split_may_be_part_of_a_folder(tmp_path: Path) -> None:
    files = [f"annotations/instances_{n}2014.json" for n in ("minival", "valminusminival", "train")]
    create(tmp_path, *files, "train2014/", "val2014/", "2014/")
    assert {split: config.images.name for split, config in find_splits(tmp_path).items()} == {
        "minival2014": "val2014",
        "train2014": "train2014",
        "valminusminival2014": "val2014",
    }


def test_images_may_be_in_one_folder(tmp_path: Path) -> None:
    create(tmp_path, "annotations/instances_default.json", "images/")
    assert find_splits(tmp_path)["default"].images == tmp_path / "images"


def test_folders_of_another_layout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"annotations/\*\.json.*--images"):
        find_splits(tmp_path)
    create(tmp_path, "annotations/train.json", "annotations/val.json", "pictures/")
    with pytest.raises(DataError, match=r"train/ or val/.*--images"):
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
    create(tmp_path, *(f"annotations/{s}.json" for s in splits), *(f"{s}/" for s in splits))
    assert find_validation_split(tmp_path) == find_splits(tmp_path)[chosen]


@pytest.mark.parametrize("splits", [("test", "train"), ("train", "val_day", "val_night")])
def test_an_ambiguous_validation_split_is_an_error(tmp_path: Path, splits: tuple[str, ...]) -> None:
    create(tmp_path, *(f"annotations/{s}.json" for s in splits), *(f"{s}/" for s in splits))
    with pytest.raises(DataError, match=f"{', '.join(splits)}.*--images"):
        find_validation_split(tmp_path)

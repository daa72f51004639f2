import re
from pathlib import Path
from typing import Any

import pytest
from layout_folders import coco_content, draw_scenes, save_images, write_json
from pycocotools.coco import COCO

from maskrcnn_trt.training.data.coco.dataset import DataError
from maskrcnn_trt.training.data.convert.layouts import DataLayout, LayoutSplit
from maskrcnn_trt.training.data.edit.split_merge_filter import split_content
from maskrcnn_trt.training.finetune.splits import choose_splits


def content_of(names: list[str]) -> dict[str, Any]:
    images = [{"id": n, "file_name": name} for n, name in enumerate(names)]
    annotations = [{"id": n, "image_id": n // 2} for n in range(2 * len(names))]
    return {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "a"}]}


def hold_out(content: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    parts = split_content(content, {"val": 0.1})
    return parts["train"].content, parts["val"].content


def names_in(content: dict[str, Any]) -> set[str]:
    return {image["file_name"] for image in content["images"]}


def test_a_tenth_is_held_out_and_stays_so_when_images_are_added() -> None:
    names = [f"IMG_{n}.jpg" for n in range(2000)]
    _, val = hold_out(content_of(names))
    assert 160 < len(names_in(val)) < 240
    _, fewer = hold_out(content_of(names[::-2]))
    assert names_in(fewer) == names_in(val) & set(names[::-2])


@pytest.mark.parametrize("count", [2, 3, 10])
def test_both_parts_of_a_small_data_set_have_images(count: int) -> None:
    for start in range(50):
        parts = hold_out(content_of([f"{start + n}.png" for n in range(count)]))
        assert all(names_in(part) for part in parts)


def test_a_single_image_is_for_training() -> None:
    train, val = hold_out(content_of(["a.jpg"]))
    assert names_in(train) == {"a.jpg"}
    assert not val["images"]


def test_augmented_copies_stay_together() -> None:
    names = [f"{n}_jpg.rf.{copy}.jpg" for n in range(200) for copy in ("0a1b", "c3d4", "55ff")]
    parts = hold_out(content_of(names))
    train, val = ({re.sub(r"_.*", "", name) for name in names_in(part)} for part in parts)
    assert not train & val
    assert len(val) > 5


def layout_of(*names: str) -> DataLayout:
    return DataLayout("COCO", {n: LayoutSplit(Path(n), Path(f"{n}.json")) for n in names})


@pytest.mark.parametrize(
    ("names", "train", "val"),
    [
        (("test", "train", "valid"), "train", "valid"),
        (("Train", "Validation"), "Train", "Validation"),
        (("train2017", "val2017"), "train2017", "val2017"),
        (("minival2014", "train2014", "val2014", "valminusminival2014"), "train2014", "val2014"),
    ],
)
def test_splits_are_chosen_by_name(
    tmp_path: Path, names: tuple[str, ...], train: str, val: str
) -> None:
    chosen = choose_splits(layout_of(*names), tmp_path)
    assert chosen.train.images == Path(train)
    assert chosen.val is not None
    assert chosen.val.images == Path(val)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names", [("a", "b"), ("train2014", "train2017", "val2017")])
def test_ambiguous_splits_are_errors(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=f"{names[0]}.*{names[1]}.*data.train"):
        choose_splits(layout_of(*names), tmp_path)


def test_divided_files_can_be_read(tmp_path: Path) -> None:
    scenes = draw_scenes(30)
    save_images(tmp_path / "images", scenes)
    write_json(tmp_path / "all.json", coco_content(scenes))
    layout = DataLayout("COCO", {"all": LayoutSplit(tmp_path / "images", tmp_path / "all.json")})
    chosen = choose_splits(layout, tmp_path / "data")
    assert chosen.val is not None
    chosen.write()
    files = [COCO(config.annotations) for config in (chosen.train, chosen.val)]
    assert sum(len(file.imgs) for file in files) == 30
    assert all(file.anns and (tmp_path / "images").samefile(chosen.train.images) for file in files)
    assert f"{len(files[1].imgs)} of 30" in chosen.description


def test_held_out_images_are_those_of_the_first_entry_of_each_id(tmp_path: Path) -> None:
    content = content_of([f"{n}.jpg" for n in range(20)])
    content["images"].append({"id": 3, "file_name": "again.jpg"})
    write_json(tmp_path / "all.json", content)
    layout = DataLayout("COCO", {"all": LayoutSplit(tmp_path, tmp_path / "all.json")})
    chosen = choose_splits(layout, tmp_path / "data")
    assert chosen.faults == {"images: duplicate id": ["again.jpg"]}
    contents = [source.content for source in chosen.converted.values()]
    assert set.union(*map(names_in, contents)) == names_in(content) - {"again.jpg"}
    assert sum(len(part["annotations"]) for part in contents) == len(content["annotations"])

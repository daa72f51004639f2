"""Convert small data sets in Cityscapes' layout, and read them with pycocotools and CocoDataset."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_folder import write_image
from PIL import Image
from pycocotools.coco import COCO

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.convert.cityscapes import cityscapes
from maskrcnn_trt.training.data.convert.conversion import write_coco_files

HEIGHT, WIDTH = 48, 64


def rectangle(label: str, left: int, top: int, right: int, bottom: int, **more: Any) -> Any:
    """Return an object of a polygon file. Right and bottom are inclusive."""
    corners = [[left, top], [right, top], [right, bottom], [left, bottom]]
    return {"label": label, "polygon": corners, **more}


def write_polygons(folder: Path, frame: str, *objects: Any, split: str = "train") -> Path:
    path = folder / "gtFine" / split / "bern" / f"{frame}_gtFine_polygons.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"imgHeight": HEIGHT, "imgWidth": WIDTH, "objects": objects}))
    return path


def write_instance_ids(folder: Path, frame: str, ids: np.ndarray, split: str = "train") -> Path:
    path = folder / "gtFine" / split / "bern" / f"{frame}_gtFine_instanceIds.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(ids.astype(np.uint16)).save(path)
    return path


def masks_in(path: Path, file_name: str) -> list[tuple[int, int, np.ndarray]]:
    """Return category id, crowd flag and mask of each annotation, as pycocotools reads them."""
    coco = COCO(path)
    (image_id,) = (id_ for id_, image in coco.imgs.items() if image["file_name"] == file_name)
    annotations = coco.loadAnns(coco.getAnnIds([image_id]))
    return [(a["category_id"], a["iscrowd"], coco.annToMask(a)) for a in annotations]


def rectangle_mask(left: int, top: int, right: int, bottom: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[top : bottom + 1, left : right + 1] = 1
    return mask


def assert_same(actual: Any, expected: Any) -> None:
    assert [entry[:2] for entry in actual] == [entry[:2] for entry in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours[2], theirs[2])


def test_instance_ids_become_masks_pixel_for_pixel(tmp_path: Path) -> None:
    ids = np.full((HEIGHT, WIDTH), 7)  # road
    ids[5:20, 10:30] = 26000
    ids[5:20, 18:22] = 17  # a pole that splits the car into two pieces
    ids[40:48, 60:64] = 26001  # in the last corner
    ids[0:3, 0:4] = 26  # a group of cars
    ids[30:34, 0:9] = 24000
    ids[30:34, 20:29] = 29000  # a caravan: not a class of the benchmark
    path = write_instance_ids(tmp_path, "bern_000001_000019", ids)
    path.with_name(f"._{path.name}").touch()  # macOS writes such files
    written = write_coco_files(cityscapes(tmp_path), tmp_path / "coco")
    file = written["train"]
    assert (file.images, file.objects, file.crowds) == (1, 3, 1)
    assert_same(
        masks_in(file.path, "bern/bern_000001_000019_leftImg8bit.png"),
        [(26, 1, ids == 26), (24, 0, ids == 24000), (26, 0, ids == 26000), (26, 0, ids == 26001)],
    )
    for annotation in json.loads(file.path.read_text())["annotations"]:
        mask = COCO(file.path).annToMask(annotation)
        assert annotation["area"] == mask.sum()
        rows, columns = np.nonzero(mask)
        left, top = columns.min(), rows.min()
        size = columns.max() + 1 - left, rows.max() + 1 - top
        assert annotation["bbox"] == [left, top, *size]


def test_later_polygons_cover_earlier_ones(tmp_path: Path) -> None:
    write_polygons(
        tmp_path,
        "bern_000001_000019",
        rectangle("road", 0, 0, 63, 47),
        rectangle("car", 10, 10, 40, 30),
        rectangle("license plate", 12, 12, 14, 13),
        rectangle("pole", 20, 0, 22, 47),
        rectangle("truck", 50, 10, 60, 20, deleted=True),
        rectangle("persongroup", 0, 40, 9, 45),
        rectangle("persongroup", 30, 40, 39, 45),
        rectangle("car", 35, 10, 45, 30),
        {"label": "bus", "polygon": [[1, 1], [2, 2]]},
    )
    file = write_coco_files(cityscapes(tmp_path), tmp_path / "coco")["train"]
    assert_same(
        masks_in(file.path, "bern/bern_000001_000019_leftImg8bit.png"),
        [
            (24, 1, rectangle_mask(0, 40, 9, 45) | rectangle_mask(30, 40, 39, 45)),
            (26, 0, rectangle_mask(10, 10, 34, 30) - rectangle_mask(20, 10, 22, 30)),
            (26, 0, rectangle_mask(35, 10, 45, 30)),
        ],
    )


def test_instance_ids_are_preferred_to_polygons(tmp_path: Path) -> None:
    ids = np.zeros((HEIGHT, WIDTH))
    ids[10:20, 10:20] = 33000
    write_instance_ids(tmp_path, "bern_000001_000019", ids)
    write_polygons(tmp_path, "bern_000001_000019", rectangle("car", 0, 0, 9, 9))
    write_polygons(tmp_path, "bern_000000_000019", rectangle("car", 0, 0, 9, 9))
    file = write_coco_files(cityscapes(tmp_path), tmp_path / "coco")["train"]
    content = json.loads(file.path.read_text())
    assert [a["category_id"] for a in content["annotations"]] == [26, 33]
    assert [image["id"] for image in content["images"]] == [1, 2]


def test_coco_dataset_finds_the_images(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_polygons(tmp_path, "bern_1_2", rectangle("rider", 3, 4, 20, 30), split=split)
        write_polygons(tmp_path, "bern_1_3", split=split)
        for frame in ("bern_1_2", "bern_1_3"):
            path = tmp_path / "leftImg8bit" / split / "bern" / f"{frame}_leftImg8bit.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_image(path, HEIGHT, WIDTH)
    source = cityscapes(tmp_path)
    written = write_coco_files(source, tmp_path / "coco")
    assert list(written) == ["train", "val"]
    for name, file in written.items():
        config = DatasetConfig(images=source.splits[name].images, annotations=file.path)
        dataset = CocoDataset(config, on_broken="refuse")
        assert [len(record.objects) for record in dataset.records] == [1, 0]
        assert dataset.categories[1].name == "rider"
        assert dataset.records[0].objects[0].label == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "content: Invalid JSON"),
        ('{"imgHeight": 0, "imgWidth": 8, "objects": []}', "imgHeight: "),
        ('{"imgHeight": 8, "imgWidth": 8}', "objects: Field required"),
        (
            '{"imgHeight": 8, "imgWidth": 8, "objects": [{"label": "car", "polygon": [[1]]}]}',
            r"objects\.0\.polygon\.0\.1: ",
        ),
    ],
)
def test_damaged_polygon_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = write_polygons(tmp_path, "bern_1_2")
    path.write_text(text)
    with pytest.raises(DataError, match=rf"bern_1_2_gtFine_polygons\.json .*{message}"):
        write_coco_files(cityscapes(tmp_path), tmp_path / "coco")
    assert list((tmp_path / "coco").iterdir()) == []


def test_damaged_and_coloured_label_maps_are_named(tmp_path: Path) -> None:
    path = write_instance_ids(tmp_path, "bern_1_2", np.full((HEIGHT, WIDTH), 26000))
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"bern_1_2_gtFine_instanceIds\.png .*PNG"):
        write_coco_files(cityscapes(tmp_path), tmp_path / "coco")
    Image.new("RGB", (WIDTH, HEIGHT)).save(path)
    with pytest.raises(DataError, match="RGB, not I or I;16"):
        write_coco_files(cityscapes(tmp_path), tmp_path / "coco")


def test_files_are_replaced_only_with_overwrite(tmp_path: Path) -> None:
    write_polygons(tmp_path, "bern_1_2", split="val")
    out = tmp_path / "coco"
    write_coco_files(cityscapes(tmp_path), out)
    (out / "val.json").write_text("mine")
    with pytest.raises(DataError, match=r"val\.json exists; .*--overwrite"):
        write_coco_files(cityscapes(tmp_path), out)
    assert (out / "val.json").read_text() == "mine"
    write_coco_files(cityscapes(tmp_path), out, overwrite=True)
    assert json.loads((out / "val.json").read_text())["images"]


def test_an_interruption_keeps_the_files_of_all_splits(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_polygons(tmp_path, "bern_1_2", split=split)
    out = tmp_path / "coco"
    out.mkdir()
    for name in ("train.json", "val.json"):
        (out / name).write_text("mine")
    calls = iter([None])
    with pytest.raises(StopIteration):  # at the second image, which is that of `val`
        write_coco_files(cityscapes(tmp_path), out, overwrite=True, on_image=lambda: next(calls))
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "train.json": "mine", "val.json": "mine",
    }  # fmt: skip


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gtFine/train.*gtFine_trainvaltest\.zip"):
        cityscapes(tmp_path)

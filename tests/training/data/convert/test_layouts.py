"""The same images in five layouts, compared with pycocotools and Pillow on the outlines."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from layout_folders import (
    NAMES,
    WRITERS,
    Scene,
    coco_content,
    draw_scenes,
    save_images,
    write_json,
    write_labelme,
    write_yolo,
)
from PIL import Image, ImageDraw
from pycocotools import mask as coco_mask

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError, read_json
from maskrcnn_trt.training.data.coco.mask_targets import mask_from_segmentation
from maskrcnn_trt.training.data.convert.command import convert
from maskrcnn_trt.training.data.convert.layouts import recognize_layout
from maskrcnn_trt.training.data.inspect.command import inspect

# pycocotools 2.0.11 with numpy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TRAIN, VAL = draw_scenes(5, seed=1), draw_scenes(2, seed=2)
VAL = [scene._replace(name=f"val_{scene.name}") for scene in VAL]


def assert_same(dataset: CocoDataset, scenes: list[Scene]) -> None:
    """Compare sizes, classes and masks with the scenes."""
    names = [category.name for category in dataset.categories]
    assert {r.path.name for r in dataset.records} == {scene.name for scene in scenes}
    by_name = {scene.name: scene for scene in scenes}
    for record in dataset.records:
        scene = by_name[record.path.name]
        size = (record.height, record.width)
        assert size == (scene.height, scene.width)
        assert [names[i.label - 1] for i in record.objects] == [n for n, _ in scene.objects]
        for instance, (_, points) in zip(record.objects, scene.objects, strict=True):
            (expected,) = coco_mask.frPyObjects([points.ravel().tolist()], *size)
            mask = mask_from_segmentation(instance.segmentation, size, size)
            reference = coco_mask.decode(expected)
            assert np.logical_xor(mask, reference).sum() <= 0.03 * reference.sum()
            low, high = points.min(axis=0), points.max(axis=0)
            np.testing.assert_allclose(instance.bbox, [*low, *(high - low)], atol=0.01)


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


def test_one_coco_file_beside_its_images_is_a_data_set(tmp_path: Path) -> None:
    save_images(tmp_path, TRAIN)
    write_json(tmp_path / "labels.json", coco_content(TRAIN))
    assert_same(recognize_layout(tmp_path).splits["labels"].load("refuse"), TRAIN)


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


# LabelMe


def labelme_dataset(folder: Path, *shapes: dict[str, Any], **changes: Any) -> CocoDataset:
    """Write an image with these shapes beside valid ones, and read the folder."""
    write_labelme(folder, TRAIN, [])
    path = folder / "photo_000.json"
    content = {**json.loads(path.read_text()), **changes}
    content["shapes"] = [{"label": "bolt", "group_id": None, **shape} for shape in shapes]
    path.write_text(json.dumps(content))
    (split,) = recognize_layout(folder).splits.values()
    return split.load()


SQUARE = [[20, 10], [50, 10], [50, 40], [20, 40]]
OTHER = [[60, 10], [80, 10], [80, 30], [60, 30]]


def drawn(shape: str, points: list[list[float]]) -> np.ndarray:
    canvas = Image.new("L", (TRAIN[0].width, TRAIN[0].height))
    getattr(ImageDraw.Draw(canvas), shape)([tuple(p) for p in points], fill=1)
    return np.asarray(canvas)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"shape_type": "polygon", "points": SQUARE}, drawn("polygon", SQUARE)),
        ({"points": SQUARE}, drawn("polygon", SQUARE)),
        ({"shape_type": "rectangle", "points": [[50, 40], [20, 10]]}, drawn("polygon", SQUARE)),
        (
            {"shape_type": "circle", "points": [[48, 36], [48, 56]]},
            drawn("ellipse", [[28, 16], [68, 56]]),
        ),
    ],
)
def test_shapes_of_labelme_become_masks(
    tmp_path: Path, shape: dict[str, Any], expected: np.ndarray
) -> None:
    record = labelme_dataset(tmp_path, shape).records[0]
    size = (record.height, record.width)
    mask = mask_from_segmentation(record.objects[0].segmentation, size, size)
    # Pillow includes the pixels of the right and lower edges.
    assert np.logical_xor(mask, expected).sum() < 0.07 * expected.sum()
    assert record.objects[0].area == pytest.approx(mask.sum(), rel=0.01)


def test_masks_of_labelme_are_read(tmp_path: Path) -> None:
    import base64
    import io

    crop = np.zeros((20, 30), np.uint8)
    crop[4:, 5:] = 255
    file = io.BytesIO()
    Image.fromarray(crop).save(file, format="PNG")
    text = base64.b64encode(file.getvalue()).decode()
    shape = {"shape_type": "mask", "points": [[7, 9], [36, 28]], "mask": text}
    record = labelme_dataset(tmp_path, shape, {**shape, "mask": "!"}).records[0]
    (instance,) = record.objects
    size = (record.height, record.width)
    mask = mask_from_segmentation(instance.segmentation, size, size)
    expected = np.zeros(size, np.uint8)
    expected[9:29, 7:37] = crop // 255
    np.testing.assert_array_equal(mask, expected)
    assert instance.bbox == (12, 13, 25, 16)


def test_shapes_of_a_group_are_one_object(tmp_path: Path) -> None:
    pieces = [{"points": points, "group_id": 4} for points in (SQUARE, OTHER)]
    record = labelme_dataset(tmp_path, *pieces, {"points": OTHER}).records[0]
    assert [len(instance.segmentation) for instance in record.objects] == [2, 1]
    assert record.objects[0].bbox == (20, 10, 60, 30)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"points": SQUARE[:2]}, "fewer than three"),
        ({"points": [[1, 2], [3]]}, "pairs of numbers"),
        ({"points": [["a", "b"]] * 3}, "pairs of numbers"),
        ({"points": None}, "pairs of numbers"),
        ({"points": SQUARE, "shape_type": "linestrip"}, "linestrip has no area"),
        ({"points": SQUARE, "shape_type": "mask", "mask": "AAAA"}, "mask is damaged"),
        ({"points": SQUARE, "label": ""}, "no label"),
        ({"points": [[1e300, 0], [0, 1e300], [5, 5]]}, "far outside"),
        ({"points": [[0, 0], [1e300, 1e300]], "shape_type": "circle"}, "far outside"),
    ],
)
def test_invalid_shapes_of_labelme_are_named(
    tmp_path: Path, shape: dict[str, Any], reason: str
) -> None:
    dataset = labelme_dataset(tmp_path, {"points": OTHER}, shape)
    assert len(dataset.records[0].objects) == 1
    ((found, names),) = dataset.faults.items()
    assert reason in found
    assert names == ("photo_000.json:1",)


def test_regions_that_labelme_ignores_are_left_out(tmp_path: Path) -> None:
    dataset = labelme_dataset(tmp_path, {"points": SQUARE, "label": "__ignore__"})
    assert not dataset.records[0].objects
    assert not dataset.faults


@pytest.mark.parametrize("path", ["..\\elsewhere\\photo_000.jpg", "", "gone.jpg", "x" * 5000])
def test_images_of_labelme_are_found_after_a_move(tmp_path: Path, path: str) -> None:
    dataset = labelme_dataset(tmp_path, {"points": SQUARE}, imagePath=path, imageHeight=None)
    assert dataset.records[0].path.resolve() == tmp_path / "photo_000.jpg"


def test_folders_of_labelme_may_be_splits(tmp_path: Path) -> None:
    write_labelme(tmp_path / "Train", TRAIN, [])
    write_labelme(tmp_path / "validation", VAL, [])
    splits = recognize_layout(tmp_path).splits
    assert_same(splits["train"].load("refuse"), TRAIN)
    assert_same(splits["val"].load("refuse"), VAL)


def test_files_that_labelme_did_not_write_are_named(tmp_path: Path) -> None:
    write_labelme(tmp_path, TRAIN, [])
    (tmp_path / "photo_001.json").write_text("{")
    (tmp_path / "photo_002.json").write_text("[" * 100_000)
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "photo_003.jpg").unlink()
    (split,) = recognize_layout(tmp_path).splits.values()
    faults = split.load().faults
    assert faults == {
        "files: not readable as JSON": ("photo_001.json", "photo_002.json"),
        "files: image missing": ("photo_003.json",),
        "files: not in the format of LabelMe": ("settings.json",),
    }


# YOLO

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
    label.write_text(label.read_text() + "\n".join(lines))
    (tmp_path / "train" / "images" / "photo_001.jpg").write_bytes(b"no image")
    with Image.open(tmp_path / "train" / "images" / "photo_002.jpg") as image:
        image.save(tmp_path / "train" / "images" / "photo_005.bmp")
    dataset = recognize_layout(tmp_path).splits["train"].load()
    assert {reason: names for reason, names in dataset.faults.items() if "label" in reason} == {
        "labels: box without an outline": ("photo_000.txt:2",),
        "labels: unknown class": ("photo_000.txt:3",),
        "labels: not a class and numbers": ("photo_000.txt:4", "photo_000.txt:7"),
        "labels: coordinates far outside the image": ("photo_000.txt:8",),
        "labels: polygon of fewer than three points, or without a last y": ("photo_000.txt:6",),
    }
    others = ("photo_001.jpg", "photo_005.bmp")
    assert dataset.faults["images: not a JPEG, PNG or WebP image"] == others
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
        ("train: nowhere\nnames: [a]\n", "no split with images.*nowhere"),
        ("train: train/images\nnames: 3\n", "`names` must be"),
        ("names: [a\n", "is not YAML"),
        (f"train: {'x' * 5000}\nnames: [a]\n", "no split with images"),
    ],
)
def test_incomplete_yaml_files_are_errors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        recognize_layout(yolo_folder(tmp_path, text))


def test_a_folder_around_the_data_set_is_skipped(tmp_path: Path) -> None:
    WRITERS["Roboflow"](tmp_path / "download" / "parts", TRAIN, VAL)
    (tmp_path / "download" / "README.txt").touch()
    assert set(recognize_layout(tmp_path).splits) == {"train", "valid"}


def test_unknown_folders_are_errors_that_name_the_layouts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"COCO.*Roboflow.*CVAT.*LabelMe.*YOLO"):
        recognize_layout(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        recognize_layout(tmp_path / "nowhere")

"""LabelMe files, compared with Pillow and with masks drawn by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_folders import NAMES, TRAIN, VAL, assert_same, write_labelme
from PIL import Image, ImageDraw

from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.coco.segmentation_masks import mask_from_segmentation
from maskrcnn_trt.training.data.convert.layouts import recognize_layout


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
    assert names == ("photo_000.json:2",)


def test_regions_that_labelme_ignores_are_left_out(tmp_path: Path) -> None:
    dataset = labelme_dataset(tmp_path, {"points": SQUARE, "label": "__ignore__"})
    assert not dataset.records[0].objects
    assert not dataset.faults


@pytest.mark.parametrize("path", ["..\\elsewhere\\photo_000.jpg", "", "gone.jpg", "x" * 5000])
def test_images_of_labelme_are_found_after_a_move(tmp_path: Path, path: str) -> None:
    dataset = labelme_dataset(tmp_path, {"points": SQUARE}, imagePath=path, imageHeight=None)
    assert dataset.records[0].path.resolve() == tmp_path / "photo_000.jpg"


def test_images_of_labelme_are_found_in_another_unicode_form(tmp_path: Path) -> None:
    labelme_dataset(tmp_path, {"points": SQUARE}, imagePath="\u00e9.jpg")
    (tmp_path / "photo_000.json").rename(tmp_path / "renamed.json")
    image = (tmp_path / "photo_000.jpg").rename(tmp_path / "e\u0301.jpg")
    (split,) = recognize_layout(tmp_path).splits.values()
    assert image in {record.path for record in split.load(on_broken="refuse").records}


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


def test_blanks_around_labels_of_labelme_are_ignored(tmp_path: Path) -> None:
    shapes = [{"points": SQUARE, "label": label} for label in ("bolt", " bolt", "bolt\t ", "  ")]
    dataset = labelme_dataset(tmp_path, *shapes)
    assert sorted(c.name for c in dataset.categories) == sorted(NAMES)
    assert len({instance.label for instance in dataset.records[0].objects}) == 1
    assert dataset.faults == {"shapes: no label": ("photo_000.json:4",)}


def test_shapes_are_counted_if_none_is_a_labelled_area(tmp_path: Path) -> None:
    write_labelme(tmp_path, TRAIN[:1], [])
    shapes = [{"label": "bolt", "shape_type": "point", "points": [[9, 9]]}] * 2
    content = {"shapes": [*shapes, {"label": None, "points": SQUARE}], "imagePath": "a.jpg"}
    (tmp_path / "photo_000.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"2 point, 1 polygon without label; .*polygon, rectangle"):
        recognize_layout(tmp_path)


def test_images_inside_labelme_files_are_named_as_missing(tmp_path: Path) -> None:
    write_labelme(tmp_path, TRAIN, [])
    (tmp_path / "photo_000.jpg").unlink()
    path = tmp_path / "photo_000.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "imageData": "AAAA"}))
    (split,) = recognize_layout(tmp_path).splits.values()
    dataset = split.load()
    ((reason, names),) = dataset.faults.items()
    assert "imageData is not read" in reason
    assert names == ("photo_000.json",)


def test_labels_without_an_area_are_no_classes(tmp_path: Path) -> None:
    dataset = labelme_dataset(
        tmp_path,
        {"points": SQUARE},
        {"label": "tip", "shape_type": "point", "points": [[9, 9]]},
        imageHeight=0,
        imageWidth=0,
    )
    assert "tip" not in {category.name for category in dataset.categories}
    assert dataset.faults["shapes: shape_type point has no area"] == ("photo_000.json:2",)
    assert (dataset.records[0].height, dataset.records[0].width) == (
        *(TRAIN[0].height, TRAIN[0].width),
    )

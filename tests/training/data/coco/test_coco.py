import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_folder import HEIGHT, WIDTH, annotation, ring_segmentation, valid_content, write_folder
from pycocotools.coco import COCO

from maskrcnn_trt.model.bundle.manifest import Category
from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.coco.mask_targets import mask_from_segmentation


def test_index_holds_what_the_file_says(tmp_path: Path) -> None:
    dataset = CocoDataset(write_folder(tmp_path, valid_content()), on_broken="refuse")
    assert dataset.categories == (Category(id=7, name="square"), Category(id=30, name="thing"))
    assert [record.id for record in dataset.records] == [2, 5, 8, 9, 11]
    assert [len(record.instances) for record in dataset.records] == [1, 2, 3, 1, 0]
    assert [len(record.objects) for record in dataset.records] == [1, 2, 2, 0, 0]
    assert [instance.label for instance in dataset.records[1].instances] == [1, 2]
    assert dataset.records[0].instances[0].area == 1200


def test_masks_equal_those_of_pycocotools(tmp_path: Path) -> None:
    config = write_folder(tmp_path, valid_content())
    reference = COCO(config.annotations)
    for record in CocoDataset(config).records:
        for instance in record.instances:
            size = (record.height, record.width)
            mask = mask_from_segmentation(instance.segmentation, size, size)
            expected = reference.annToMask(reference.anns[instance.annotation_id])
            np.testing.assert_array_equal(mask, expected)


def test_ground_truth_is_the_file_with_new_annotation_ids(tmp_path: Path) -> None:
    content = valid_content()
    dataset = CocoDataset(write_folder(tmp_path, content))
    truth = dataset.ground_truth()
    key = {"key": lambda entry: (entry["image_id"], entry["bbox"], entry["iscrowd"])}
    assert [a["id"] for a in truth["annotations"]] == [1, 2, 3, 4, 5, 6, 7]
    for ours, theirs in zip(
        sorted(truth["annotations"], **key), sorted(content["annotations"], **key), strict=True
    ):
        for name in ("image_id", "category_id", "bbox", "iscrowd"):
            assert ours[name] == theirs[name]
        assert ours["area"] == theirs.get("area", 1200)
    some = dataset.ground_truth([8, 11])
    assert [image["id"] for image in some["images"]] == [8, 11]
    assert {a["image_id"] for a in some["annotations"]} == {8}


NO_MASK = "no polygons or RLE; export the data as instance segmentation, not as boxes"
_SHORT_RUNS = {"size": [HEIGHT, WIDTH], "counts": [100, 50]}
_OTHER_SIZE = {**ring_segmentation(compressed=True), "size": [WIDTH, HEIGHT]}
_CUT_RUNS = {"size": [HEIGHT, WIDTH], "counts": ring_segmentation(compressed=True)["counts"][:-3]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"category_id": 99}, "unknown category"),
        ({"category_id": [7]}, "unknown category"),
        ({"image_id": 99}, "unknown image"),
        ({"image_id": None}, "unknown image"),
        ({"bbox": [10, 20, 0, 40]}, "box without area inside the image"),
        ({"bbox": [40, 20, -30, 40]}, "box without area inside the image"),
        ({"bbox": [WIDTH, 20, 30, 40]}, "box without area inside the image"),
        ({"bbox": [10, 20, 30]}, "box is not four numbers"),
        ({"bbox": [10, 20, 30, float("nan")]}, "box is not four numbers"),
        ({"segmentation": []}, NO_MASK),
        ({"segmentation": None}, NO_MASK),
        ({"segmentation": [[10, 20, 40, 20]]}, "polygon of fewer than three points"),
        ({"segmentation": [[10, 20, 40, 20, 40, 60, 10]]}, "polygon of fewer than three points"),
        ({"segmentation": [["a"] * 6]}, "polygon is not a list of numbers"),
        ({"segmentation": [[10, 20, 1e300, 20, 40, 60]]}, "coordinates far outside the image"),
        ({"segmentation": [[10, 20, 2147483647, 20, 40, 60]]}, "coordinates far outside the image"),
        ({"segmentation": [[10, 20, 10**400, 20, 40, 60]]}, "coordinates far outside the image"),
        ({"bbox": [10, 20, 1e300, 40]}, "coordinates far outside the image"),
        ({"bbox": ["10", "20", "1e300", "40"]}, "coordinates far outside the image"),
        ({"bbox": ["10", 10**400, 30, 40]}, "box is not four numbers"),
        ({"iscrowd": "yes"}, "iscrowd is neither 0 nor 1"),
        ({"segmentation": "a"}, "segmentation is neither polygons nor RLE"),
        ({"segmentation": _SHORT_RUNS}, "RLE is damaged"),
        ({"segmentation": {**_SHORT_RUNS, "counts": "!!"}}, "RLE is damaged"),
        ({"segmentation": {**_SHORT_RUNS, "counts": None}}, "RLE is damaged"),
        ({"segmentation": {**_SHORT_RUNS, "counts": [-1, 2]}}, "RLE is damaged"),
        ({"segmentation": {**_SHORT_RUNS, "counts": ["a"]}}, "RLE is damaged"),
        ({"segmentation": _CUT_RUNS}, "RLE is damaged"),
        ({"segmentation": _OTHER_SIZE}, "RLE of another size than the image"),
    ],
)
def test_invalid_annotations_are_skipped_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    content = valid_content()
    content["annotations"].append({**annotation(77, 5), **changes})
    config = write_folder(tmp_path, content)
    with caplog.at_level(logging.WARNING):
        dataset = CocoDataset(config)
    assert dataset.faults == {f"annotations: {reason}": ("77",)}
    assert [len(record.instances) for record in dataset.records] == [1, 2, 3, 1, 0]
    assert f"1 annotations: {reason} (77)" in caplog.text
    with pytest.raises(DataError, match=rf"{reason} \(77\).*data\.on_broken=skip"):
        CocoDataset(config, on_broken="refuse")


@pytest.mark.parametrize("changes", [{"width": None}, {"height": 0}])
def test_missing_sizes_are_those_of_the_files(tmp_path: Path, changes: dict[str, Any]) -> None:
    content = valid_content()
    config = write_folder(tmp_path, content)
    content["images"][0].update(changes)
    config.annotations.write_text(json.dumps(content))
    dataset = CocoDataset(config, on_broken="refuse")
    assert {(r.height, r.width) for r in dataset.records} == {(HEIGHT, WIDTH), (WIDTH, HEIGHT)}
    (config.images / content["images"][0]["file_name"]).write_bytes(b"no image")
    (reason,) = CocoDataset(config).faults
    assert reason.startswith("images: no height and width")


@pytest.mark.parametrize("compressed", [True, False])
def test_sizes_of_rles_may_be_text(tmp_path: Path, compressed: bool) -> None:
    content = valid_content()
    rle = {**ring_segmentation(compressed=compressed), "size": [str(HEIGHT), str(WIDTH)]}
    content["annotations"].append(annotation(77, 5, segmentation=rle))
    CocoDataset(write_folder(tmp_path, content), on_broken="refuse")


def test_missing_boxes_are_those_of_the_segmentations(tmp_path: Path) -> None:
    content = valid_content()
    listed = CocoDataset(write_folder(tmp_path, content))
    for own in content["annotations"]:
        del own["bbox"]
    computed = CocoDataset(write_folder(tmp_path, content))
    assert not computed.faults
    for record, other in zip(listed.records, computed.records, strict=True):
        assert [one.bbox for one in record.instances] == [one.bbox for one in other.instances]


@pytest.mark.parametrize(
    "ring", [[1, 2, 3, 4], [], ["a"] * 6, [float("nan")] * 6, [1e300, 0] * 3, {}, 7, None]
)
def test_invalid_polygons_beside_valid_ones_are_left_out_and_counted(
    tmp_path: Path, ring: Any
) -> None:
    content = valid_content()
    content["annotations"][0]["segmentation"].append(ring)
    dataset = CocoDataset(write_folder(tmp_path, content), on_broken="refuse")
    assert len(dataset.records[1].instances[0].segmentation) == 1
    assert list(dataset.repairs.values()) == [("0",)]


@pytest.mark.parametrize(
    "changes",
    [
        {"segmentation": [10, 20, 40, 20, 40, 60, 10, 60]},
        {"segmentation": [[10, 20], [40, 20], [40, 60], [10, 60]]},
        {"segmentation": [[[10, 20], [40, 20], [40, 60], [10, 60]]]},
        {"bbox": ["10", "20.0", "30", "40"]},
        {"iscrowd": "0"},
        {"iscrowd": False},
        {"category_id": "7"},
        {"image_id": "5"},
        {"image_id": 5.0},
    ],
)
def test_other_spellings_of_a_valid_annotation_mean_the_same(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    content = valid_content()
    content["annotations"] = [annotation(77, 5), {**annotation(78, 5), **changes}]
    dataset = CocoDataset(write_folder(tmp_path, content), on_broken="refuse")
    first, second = ({**entry, "id": 0} for entry in dataset.ground_truth([5])["annotations"])
    assert first == second
    assert not dataset.repairs


@pytest.mark.parametrize("size", [(float(HEIGHT), float(WIDTH)), (str(HEIGHT), str(WIDTH))])
def test_sizes_may_be_floats_or_strings(tmp_path: Path, size: tuple[Any, Any]) -> None:
    config = write_folder(tmp_path, valid_content())
    content = valid_content()
    content["images"][1] |= dict(zip(("height", "width"), size, strict=True))
    config.annotations.write_text(json.dumps(content))
    record = CocoDataset(config, on_broken="refuse").records[1]
    assert (record.height, record.width) == (HEIGHT, WIDTH)
    assert isinstance(record.height, int)


def test_ids_may_be_strings(tmp_path: Path) -> None:
    config = write_folder(tmp_path, valid_content())
    content = valid_content()
    for image in content["images"]:
        image["id"] = f"img-{image['id']}"
    for entry in content["annotations"]:
        entry["image_id"] = f"img-{entry['image_id']}"
    config.annotations.write_text(json.dumps(content))
    dataset = CocoDataset(config, on_broken="refuse")
    assert [len(r.instances) for r in sorted(dataset.records, key=lambda r: int(r.path.stem))] == [
        *(1, 2, 3, 1, 0)
    ]
    assert len({record.id for record in dataset.records}) == 5
    assert len(dataset.repairs["images: id is not an integer; replaced by a number"]) == 5


def test_all_annotations_with_the_same_id_are_used(tmp_path: Path) -> None:
    content = valid_content()
    content["annotations"] = [annotation(1, 5), annotation(1, 5, category_id=30)]
    dataset = CocoDataset(write_folder(tmp_path, content))
    assert [instance.label for instance in dataset.records[1].instances] == [1, 2]
    assert list(dataset.repairs.values()) == [("1",)]


def test_classes_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    content = valid_content()
    content["categories"] = [{"id": 7, "name": "cat"}, {"id": 30, "name": "cat"}]
    dataset = CocoDataset(write_folder(tmp_path, content))
    assert [category.name for category in dataset.categories] == ["cat (7)", "cat (30)"]
    assert list(dataset.repairs.values()) == [("cat",)]


def test_polygons_with_absurd_coordinates_do_not_reach_pycocotools(tmp_path: Path) -> None:
    content = valid_content()
    content["annotations"] = [
        annotation(n, 5, segmentation=[[10, 20, x, 20, 40, 60], [10, 20, 40, 20, 40, 60]])
        for n, x in enumerate((1e300, -1e300, 2147483647, -2147483648, 1599, 1601))
    ]
    truth = CocoDataset(write_folder(tmp_path, content)).ground_truth()
    rings = [len(entry["segmentation"]) for entry in truth["annotations"]]
    assert rings == [1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"file_name": "none.jpg"}, "file missing"),
        ({"file_name": "x" * 5000}, "file missing"),
        ({"id": None}, "no id or no file name"),
        ({"height": 100_000, "width": 100_000}, "more than 64000000 pixels"),
        ({"id": 8}, "duplicate id"),
    ],
)
def test_invalid_images_are_skipped_or_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    config = write_folder(tmp_path, valid_content())
    content = valid_content()
    content["images"][-1] |= changes
    config.annotations.write_text(json.dumps(content))
    dataset = CocoDataset(config)
    assert next(iter(dataset.faults)) == f"images: {reason}"
    assert [record.id for record in dataset.records] == [5, 8, 9, 11]
    with pytest.raises(DataError, match=reason):
        CocoDataset(config, on_broken="refuse")


@pytest.mark.parametrize("prefix", ["", "gone/", "C:\\gone\\"])
def test_images_in_other_subfolders_are_found_by_unique_names(tmp_path: Path, prefix: str) -> None:
    content = valid_content()
    config = write_folder(tmp_path, content)
    (tmp_path / "batch1" / "a").mkdir(parents=True)
    for number, image in enumerate(content["images"]):
        target = tmp_path / ("batch1/a" if number % 2 else "batch1") / image["file_name"]
        (tmp_path / image["file_name"]).rename(target)
        image["file_name"] = prefix + image["file_name"]
    config.annotations.write_text(json.dumps(content))
    dataset = CocoDataset(config, on_broken="refuse")
    assert all(record.path.is_file() for record in dataset.records)
    assert [len(names) for names in dataset.repairs.values()] == [5]
    # Two files have the name `11.jpg`, and two entries `5.jpg`.
    (tmp_path / "batch1" / "b").mkdir()
    (tmp_path / "batch1" / "b" / "11.jpg").touch()
    content["images"].append({**content["images"][1], "id": 12, "file_name": "other/5.jpg"})
    config.annotations.write_text(json.dumps(content))
    (names,) = CocoDataset(config).faults.values()
    assert names == (f"{prefix}11.jpg", f"{prefix}5.jpg", "other/5.jpg")


def test_many_faults_make_a_short_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = valid_content()
    content["annotations"] += [annotation(n, 5, category_id=1) for n in range(100, 200)]
    CocoDataset(write_folder(tmp_path, content))
    assert "100 annotations: unknown category (100, 101, 102, 103, 104, ...)" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[]", "not in COCO format: it has no array 'images'"),
        ('{"images": []}', "not in COCO format: it has no array 'annotations'"),
        (
            '{"images": [1], "annotations": [], "categories": []}',
            "'images' is not an array of objects",
        ),
        ('{"images": [], "annotations": [], "categories": []}', "has no categories"),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1}]}',
            "a category without an integer id and a name",
        ),
        (
            '{"images": [], "annotations": [], "categories": '
            '[{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}',
            "two categories with id 1",
        ),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}',
            "lists no valid image",
        ),
    ],
)
def test_files_in_another_format_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "instances.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        CocoDataset(DatasetConfig(images=tmp_path, annotations=path))


def test_missing_folder_and_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere .*`maskrcnn data`"):
        CocoDataset(DatasetConfig(images=tmp_path / "nowhere", annotations=tmp_path / "a.json"))
    with pytest.raises(DataError, match=r"a\.json: No such file"):
        CocoDataset(DatasetConfig(images=tmp_path, annotations=tmp_path / "a.json"))

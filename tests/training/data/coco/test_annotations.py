import logging
from pathlib import Path
from typing import Any

import pytest
from coco_folder import HEIGHT, WIDTH, annotation, ring_segmentation, valid_content, write_folder

from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError

NO_MASK = (
    "no segmentation, neither polygons nor RLE; have the annotation tool export instance "
    "segmentation, not only boxes"
)
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
        ({"bbox": [10, 20, 0, 40]}, "box outside the image, or without area"),
        ({"bbox": [40, 20, -30, 40]}, "box outside the image, or without area"),
        ({"bbox": [WIDTH, 20, 30, 40]}, "box outside the image, or without area"),
        ({"bbox": [10, 20, 30]}, "box is not four numbers"),
        ({"bbox": [10, 20, 30, float("nan")]}, "box is not four numbers"),
        ({"segmentation": []}, NO_MASK),
        ({"segmentation": None}, NO_MASK),
        ({"segmentation": [[10, 20, 40, 20]]}, "polygon of fewer than three points"),
        (
            {"segmentation": [[10, 20, 40, 20, 40, 60, 10]]},
            "polygon with an odd number of coordinates",
        ),
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


@pytest.mark.parametrize("area", [None, "large", [1200]])
def test_missing_areas_are_those_of_the_segmentations(tmp_path: Path, area: Any) -> None:
    content = valid_content()
    content["annotations"] = [annotation(77, 5, area=area)]
    dataset = CocoDataset(write_folder(tmp_path, content), on_broken="refuse")
    assert dataset.records[1].instances[0].area == 1200
    assert not dataset.repairs


@pytest.mark.parametrize("area", [float("nan"), float("inf"), -1.0, 1e300, 10**400])
def test_impossible_areas_are_computed_and_counted(tmp_path: Path, area: float) -> None:
    content = valid_content()
    content["annotations"] = [annotation(77, 5, area=area)]
    dataset = CocoDataset(write_folder(tmp_path, content), on_broken="refuse")
    assert dataset.records[1].instances[0].area == 1200
    assert list(dataset.repairs.values()) == [("77",)]


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
    first, second = ({**entry, "id": 0} for entry in dataset.ground_truth({5})["annotations"])
    assert first == second
    assert not dataset.repairs


def test_all_annotations_with_the_same_id_are_used(tmp_path: Path) -> None:
    content = valid_content()
    content["annotations"] = [annotation(1, 5), annotation(1, 5, category_id=30)]
    dataset = CocoDataset(write_folder(tmp_path, content))
    assert [instance.label for instance in dataset.records[1].instances] == [1, 2]
    assert list(dataset.repairs.values()) == [("1",)]


def test_polygons_with_absurd_coordinates_do_not_reach_pycocotools(tmp_path: Path) -> None:
    content = valid_content()
    content["annotations"] = [
        annotation(n, 5, segmentation=[[10, 20, x, 20, 40, 60], [10, 20, 40, 20, 40, 60]])
        for n, x in enumerate((1e300, -1e300, 2147483647, -2147483648, 1599, 1601))
    ]
    truth = CocoDataset(write_folder(tmp_path, content)).ground_truth({5})
    rings = [len(entry["segmentation"]) for entry in truth["annotations"]]
    assert rings == [1, 1, 1, 1, 2, 1]

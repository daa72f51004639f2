import gzip
from pathlib import Path

import numpy as np
import pytest
from coco_folder import annotation, valid_content, write_folder
from pycocotools.coco import COCO

from maskrcnn_trt.model.bundle.manifest import Category
from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.coco.segmentation_masks import mask_from_segmentation


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
    truth = dataset.ground_truth({2, 5, 8, 9, 11})
    key = {"key": lambda entry: (entry["image_id"], entry["bbox"], entry["iscrowd"])}
    assert [a["id"] for a in truth["annotations"]] == [1, 2, 3, 4, 5, 6, 7]
    for ours, theirs in zip(
        sorted(truth["annotations"], **key), sorted(content["annotations"], **key), strict=True
    ):
        for name in ("image_id", "category_id", "bbox", "iscrowd"):
            assert ours[name] == theirs[name]
        assert ours["area"] == theirs.get("area", 1200)
    some = dataset.ground_truth({8, 11})
    assert [image["id"] for image in some["images"]] == [8, 11]
    assert {a["image_id"] for a in some["annotations"]} == {8}


def test_classes_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    content = valid_content()
    content["categories"] = [{"id": 7, "name": "cat"}, {"id": 30, "name": "cat"}]
    dataset = CocoDataset(write_folder(tmp_path, content))
    assert [category.name for category in dataset.categories] == ["cat (7)", "cat (30)"]
    assert list(dataset.repairs.values()) == [("cat",)]


def test_many_faults_make_a_short_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = valid_content()
    content["annotations"] += [annotation(n, 5, category_id=1) for n in range(100, 200)]
    CocoDataset(write_folder(tmp_path, content))
    assert "100 annotations: unknown category (100, 101, 102, 103, 104, ...)" in caplog.text
    assert "100 of 107 annotations" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[]", "not in COCO format: it has no array 'images'"),
        ('{"images": []}', "not in COCO format: it has no array 'annotations'"),
        (
            '{"images": [1], "annotations": [], "categories": []}',
            "'images' is not an array of objects; entry 0 is 1",
        ),
        ('{"images": [], "annotations": [], "categories": []}', "has no categories"),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1}]}',
            "a category whose name is missing",
        ),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1, "name": "\\ud800"}]}',
            "a category whose name is not Unicode text",
        ),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1.5, "name": "a"}]}',
            "a category without an integer id",
        ),
        (
            '{"images": [], "annotations": [], "categories": '
            '[{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}',
            "two categories with id 1",
        ),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}',
            "lists no images; .* or remove the file",
        ),
    ],
)
def test_files_in_another_format_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "instances.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        CocoDataset(DatasetConfig(images=tmp_path, annotations=path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"{}", mtime=0), "compressed with gzip"),
        ('{"images": "é"}'.encode("latin-1"), "not in UTF-8"),
    ],
)
def test_files_in_another_encoding_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "instances.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        CocoDataset(DatasetConfig(images=tmp_path, annotations=path))


def test_missing_folder_and_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"{tmp_path}/nowhere .*`maskrcnn data`"):
        CocoDataset(DatasetConfig(images=Path("nowhere"), annotations=Path("a.json")))
    with pytest.raises(DataError, match=rf"{tmp_path}/a\.json: No such file"):
        CocoDataset(DatasetConfig(images=tmp_path, annotations=Path("a.json")))

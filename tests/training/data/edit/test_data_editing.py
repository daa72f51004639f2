"""Commands that split, merge and filter COCO annotation files."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from coco_folder import annotation, valid_content, write_folder
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.commands import data


def call(*args: object) -> str:
    result = CliRunner().invoke(data, [*map(str, args)], catch_exceptions=False)
    assert not result.exit_code, result.output
    return result.output


def refusal(*args: object) -> str:
    result = CliRunner().invoke(data, [*map(str, args)])
    assert result.exit_code
    return result.output + str(result.exception)


def objects(images: Path, annotations: Path) -> Counter[tuple[Path, str, tuple[float, ...], bool]]:
    """Return path, class, box and crowd flag of all instances."""
    dataset = CocoDataset(DatasetConfig(images=images, annotations=annotations))
    assert not dataset.faults
    return Counter(
        (record.path.resolve(), dataset.categories[i.label - 1].name, i.bbox, i.is_crowd)
        for record in dataset.records
        for i in record.instances
    )


def test_merged_files_have_all_objects_of_both(tmp_path: Path) -> None:
    """Class ids of the second differ, and one of its images is also in the first."""
    contents: list[dict[str, Any]] = [valid_content(), valid_content()]
    contents[1]["categories"] = [{"id": 30, "name": "square"}, {"id": 8, "name": "new"}]
    contents[1]["annotations"] = [
        annotation(0, 5, category_id=30), annotation(1, 8, category_id=8, bbox=[11, 20, 30, 40]),
    ]  # fmt: skip
    contents[1]["images"][0]["file_name"] = "../first/11.jpg"
    files = []
    for name, content in zip(("first", "second"), contents, strict=True):
        (tmp_path / name).mkdir()
        files.append(write_folder(tmp_path / name, content))
    options = [o for f in files for o in ("--images", f.images, "--annotations", f.annotations)]
    merged = tmp_path / "out" / "merged.json"
    output = call("merge", merged, *options)
    assert f"data.train.images={tmp_path.resolve()}" in output
    expected = sum((objects(f.images, f.annotations) for f in files), Counter())
    assert objects(tmp_path, merged) == expected
    content = json.loads(merged.read_text())
    assert len(content["images"]) == 5 + 5 - 1
    classes = {c["name"]: c["id"] for c in content["categories"]}
    assert classes == {"square": 7, "new": 8, "thing": 30}
    assert "--overwrite" in refusal("merge", merged, *options)
    assert "two or more" in refusal("merge", merged, *options[:4])
    contents[0]["annotations"].append(annotation(90, 1234))
    write_folder(tmp_path / "first", contents[0])
    assert "1 annotations: unknown image or category (90)" in call(
        "merge", merged, "--overwrite", *options
    )


def test_merged_files_list_images_at_the_paths_where_they_are_found(tmp_path: Path) -> None:
    """Both sets list `upload/5.jpg`. The image is in another folder, or does not exist."""
    content = {**valid_content(), "images": [{"id": 5, "file_name": "upload/5.jpg"}]}
    options: list[object] = []
    for name in ("first", "second", "empty"):
        folder = tmp_path / name / "images"
        folder.mkdir(parents=True)
        if name != "empty":
            (folder / "5.jpg").touch()
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        options += ["--images", folder, "--annotations", tmp_path / f"{name}.json"]
    output = call("merge", tmp_path / "merged.json", *options)
    merged = json.loads((tmp_path / "merged.json").read_text())
    names = [image["file_name"] for image in merged["images"]]
    assert names == ["first/images/5.jpg", "second/images/5.jpg", "empty/images/upload/5.jpg"]
    assert f"1 image whose file does not exist, such as {tmp_path / names[2]}" in output


def test_overlapping_sets_are_merged_without_repeated_objects(tmp_path: Path) -> None:
    """The second set has the annotations of the first, a new one, and one of another class."""
    contents: list[dict[str, Any]] = [valid_content(), valid_content()]
    new = [annotation(90, 11), annotation(91, 5, category_id=31), annotation(92, 11, iscrowd=1)]
    contents[1]["annotations"] += new
    contents[1]["categories"].append({"id": 31, "name": "Thing"})
    files = []
    for name, content in zip(("first", "second"), contents, strict=True):
        files.append(write_folder(tmp_path, content).annotations.rename(tmp_path / f"{name}.json"))
    merged = tmp_path / "merged.json"
    options = [o for file in files for o in ("--images", tmp_path, "--annotations", file)]
    output = call("merge", merged, *options)
    assert f"{len(valid_content()['annotations'])} annotations: equal to another" in output
    assert "'thing' and 'Thing'" in output
    assert objects(tmp_path, merged) == objects(tmp_path, files[1])


def test_merging_reports_classes_and_images_that_one_set_repeats(tmp_path: Path) -> None:
    """One name has two categories, one id has two images, and one image has no id."""
    content: dict[str, Any] = valid_content()
    content["categories"].append({"id": 31, "name": "thing"})
    content["annotations"] = [annotation(0, 5, category_id=31), annotation(1, 11)]
    other = next(image for image in content["images"] if image["id"] == 8)
    content["images"].append({**other, "id": 5})
    content["images"].append({**other, "id": None})
    file = write_folder(tmp_path, content).annotations
    second = tmp_path / "second.json"
    second.write_text(json.dumps(valid_content()))
    merged = tmp_path / "merged.json"
    options = [o for f in (file, second) for o in ("--images", tmp_path, "--annotations", f)]
    output = call("merge", merged, *options)
    assert f"2 categories of {file} that are named 'thing' (ids 30, 31)" in output
    assert str(second) not in output
    assert f"1 images: duplicate id ({other['file_name']})" in output
    assert f"1 images: no id or no file name ({other['file_name']})" in output
    joined = json.loads(merged.read_text())
    assert len(joined["images"]) == len(valid_content()["images"])
    names = {image["id"]: image["file_name"] for image in joined["images"]}
    assert [names[a["image_id"]] for a in joined["annotations"][:2]] == ["5.jpg", "11.jpg"]
    content["categories"][-1]["id"] = 30
    write_folder(tmp_path, content)
    assert "two categories with id 30" in refusal("merge", merged, "--overwrite", *options)
    del content["categories"][-1]["id"]
    write_folder(tmp_path, content)
    assert "has no id" in refusal("merge", merged, "--overwrite", *options)


@pytest.mark.parametrize(
    ("options", "ids", "images"),
    [
        (["--classes", "thing"], {1, 3}, {2, 5, 8, 9, 11}),
        (["--classes", "square, thing", "--drop-empty"], set(range(7)), {2, 5, 8, 9}),
        (["--min-area", "1201"], {2, 3, 4, 6}, {2, 5, 8, 9, 11}),
        (["--classes", "square", "--min-area", "1201", "--drop-empty"], {2, 4, 6}, {8, 9}),
    ],
)
def test_filters_keep_a_part(
    tmp_path: Path, options: list[str], ids: set[int], images: set[int]
) -> None:
    content = valid_content()
    content["annotations"].append(annotation(90, 5, category_id=1234))
    source = write_folder(tmp_path, content).annotations
    out = tmp_path / "filtered.json"
    assert "1 annotations: unknown category (90)" in call("filter", source, out, *options)
    before, after = (json.loads(path.read_text()) for path in (source, out))
    assert {a["id"] for a in after["annotations"]} == ids
    assert all(a in before["annotations"] for a in after["annotations"])
    assert {i["id"] for i in after["images"]} == images
    names = {c["name"] for c in after["categories"]}
    assert names == ({"thing"} if options[1] == "thing" else names)


@pytest.mark.parametrize("area", [None, -1.0, float("nan"), 1e300])
@pytest.mark.parametrize("min_area", [1200, 1201, 5000])
def test_impossible_areas_are_those_of_the_segmentations(
    tmp_path: Path, min_area: int, area: float | None
) -> None:
    """The box of the ring has 6241 square pixels, but the ring has fewer than 5000."""
    content = valid_content()
    file = write_folder(tmp_path, content).annotations
    coco = COCO(str(file))
    kept = {n for n, a in coco.anns.items() if coco_mask.area(coco.annToRLE(a)) >= min_area}
    for entry in content["annotations"]:
        entry["area"] = area
    broken = {"area": area, "segmentation": [[1, 2]]}
    content["annotations"].append(annotation(90, 11, bbox=[0, 0, 100, 60], **broken))
    out = tmp_path / "filtered.json"
    write_folder(tmp_path, content)
    call("filter", file, out, "--min-area", min_area)
    assert {a["id"] for a in json.loads(out.read_text())["annotations"]} == {*kept, 90}


def test_filters_need_a_known_class(tmp_path: Path) -> None:
    source = write_folder(tmp_path, valid_content()).annotations
    assert "--min-area" in refusal("filter", source, tmp_path / "out.json")
    assert "not a finite" in refusal("filter", source, tmp_path / "out.json", "--min-area", "nan")
    with pytest.raises(DataError, match="'cat' does not exist; classes: 'thing', 'square'"):
        call("filter", source, tmp_path / "out.json", "--classes", "thing,cat")
    with pytest.raises(DataError, match="'' does not exist"):
        call("filter", source, tmp_path / "out.json", "--classes", "")
    assert "double quotes" in refusal("filter", source, tmp_path / "out.json", "--classes", "a\nb")
    assert not (tmp_path / "out.json").exists()


def test_a_class_name_with_a_comma_is_quoted(tmp_path: Path) -> None:
    content = valid_content()
    content["categories"][0]["name"] = "cat, wild"
    source, out = write_folder(tmp_path, content).annotations, tmp_path / "out.json"
    call("filter", source, out, "--classes", '"cat, wild" ,square')
    assert len(json.loads(out.read_text())["categories"]) == 2


@pytest.mark.parametrize(
    ("classes", "ids"),
    [
        ('"  sp ace"', {1}),
        ('"  sp ace" , square', {1, 5}),
        ("sp ace", {2}),
        (" sp ace ,circle", {2, 3, 4}),
        ("circle (4)", {4}),
        ("square , circle (3) ", {3, 5}),
    ],
)
def test_blanks_and_ids_tell_classes_apart(tmp_path: Path, classes: str, ids: set[int]) -> None:
    content: dict[str, Any] = valid_content()
    names = ("  sp ace", "sp ace", "circle", "circle", "square")
    content["categories"] = [{"id": n, "name": name} for n, name in enumerate(names, start=1)]
    content["annotations"] = [annotation(n, 5, category_id=n) for n in range(1, 6)]
    source, out = write_folder(tmp_path, content).annotations, tmp_path / "out.json"
    call("filter", source, out, "--classes", classes)
    assert {c["id"] for c in json.loads(out.read_text())["categories"]} == ids
    with pytest.raises(DataError, match=r"'circle', 'square', 'circle \(3\)', 'circle \(4\)'"):
        call("filter", source, tmp_path / "x.json", "--classes", "circle (5)")


def test_parts_are_disjoint_and_have_their_shares(tmp_path: Path) -> None:
    names = [f"{n}.jpg" for n in range(1000)]
    content = {
        "images": [{"id": n, "file_name": name} for n, name in enumerate(names)],
        "annotations": [annotation(n, n) for n in range(1000)],
        "categories": [{"id": 7, "name": "square"}],
    }
    file = tmp_path / "all.json"
    file.write_text(json.dumps(content))
    call("split", file, tmp_path / "parts", "--val", 0.2, "--test", 0.1)
    parts = {n: json.loads((tmp_path / "parts" / f"{n}.json").read_text())
             for n in ("train", "val", "test")}  # fmt: skip
    ids = {n: [image["id"] for image in part["images"]] for n, part in parts.items()}
    assert sorted(i for own in ids.values() for i in own) == list(range(1000))
    assert {n: round(len(own), -2) for n, own in ids.items()} == {
        "train": 700, "val": 200, "test": 100,
    }  # fmt: skip
    for name, part in parts.items():
        assert [a["image_id"] for a in part["annotations"]] == ids[name]
    assert "--overwrite" in refusal("split", file, tmp_path / "parts")
    call("split", file, tmp_path)  # `all.json` in the same folder is not an earlier part
    assert "below 1" in refusal("split", file, tmp_path / "x", "--val", 0.5, "--test", 0.5)
    small = {**content, "images": content["images"][:3]}
    file.write_text(json.dumps(small))
    assert "test.json" in refusal("split", file, tmp_path / "parts", "--overwrite")
    output = call("split", file, tmp_path / "parts", "--test", 0.1, "--overwrite")
    assert "left out: 997 annotations" in output
    assert output.count(" 1 image,") == 3


def test_file_names_may_contain_lone_surrogates(tmp_path: Path) -> None:
    content: dict[str, Any] = valid_content()
    content["images"][0]["file_name"] = "a\ud800.jpg"
    source = tmp_path / "all.json"
    source.write_text(json.dumps(content))
    call("split", source, tmp_path / "out")
    parts = [json.loads((tmp_path / "out" / f"{p}.json").read_text()) for p in ("train", "val")]
    assert sorted(i["id"] for p in parts for i in p["images"]) == [2, 5, 8, 9, 11]


def test_images_of_equal_names_and_images_with_objects_are_divided(tmp_path: Path) -> None:
    """Only two images have objects: one for each part."""
    images = [
        {"id": n, "file_name": f"case{n:02}/image.png", "height": 9, "width": 9} for n in range(30)
    ]
    content = {**valid_content(), "images": images}
    content["annotations"] = [{"id": n, "image_id": n, "category_id": 7} for n in (3, 4)]
    source = tmp_path / "all.json"
    source.write_text(json.dumps(content))
    call("split", source, tmp_path / "out", "--val", "0.2")
    parts = [json.loads((tmp_path / "out" / f"{p}.json").read_text()) for p in ("train", "val")]
    assert [len(part["annotations"]) for part in parts] == [1, 1]
    assert all(len(part["images"]) > 1 for part in parts)
    content["annotations"].pop()
    source.write_text(json.dumps(content))
    output = call("split", source, tmp_path / "out", "--overwrite")
    assert "val.json has no annotations" in output


def test_only_the_first_image_of_an_id_is_kept_in_a_part(tmp_path: Path) -> None:
    """Every id has two images. Some have no id or no name."""
    content: dict[str, Any] = valid_content()
    ids = range(20)
    content["images"] = [
        {"id": n, "file_name": f"{n}{copy}.jpg", "height": 9, "width": 9}
        for copy in ("", "-again") for n in ids
    ] + [{"file_name": "no-id.jpg"}, {"id": 99}]  # fmt: skip
    content["annotations"] = [annotation(n, n) for n in ids] + [annotation(20, 99)]
    source = tmp_path / "all.json"
    source.write_text(json.dumps(content))
    output = call("split", source, tmp_path / "out", "--val", "0.5")
    parts = [json.loads((tmp_path / "out" / f"{p}.json").read_text()) for p in ("train", "val")]
    assert all(part["images"] for part in parts)
    names = sorted(image["file_name"] for part in parts for image in part["images"])
    assert names == sorted(f"{n}.jpg" for n in ids)
    assert sorted(a["id"] for part in parts for a in part["annotations"]) == [*ids]
    faults = re.findall(r"(\d+) images: (\w+ id)", output)
    assert sum(int(count) for count, reason in faults if reason == "duplicate id") == len(ids)
    assert sum(int(count) for count, reason in faults if reason == "no id") == 2
    assert "left out: 1 annotation " in output


def test_files_without_annotations_or_images_are_named(tmp_path: Path) -> None:
    content: dict[str, Any] = {**valid_content(), "annotations": []}
    source = tmp_path / "all.json"
    source.write_text(json.dumps(content))
    output = call("split", source, tmp_path / "out")
    assert output.count("no annotations") == 1
    assert f"{source} has no annotations" in output
    source.write_text(json.dumps({**content, "images": []}))
    result = CliRunner().invoke(data, ["split", str(source), str(tmp_path / "none")])
    assert result.exit_code == 1
    assert str(source) in result.output
    assert not (tmp_path / "none").exists()

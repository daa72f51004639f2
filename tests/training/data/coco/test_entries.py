import json
import unicodedata
from pathlib import Path
from typing import Any, Literal

import pytest
from coco_folder import HEIGHT, WIDTH, valid_content, write_folder

from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError


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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"file_name": "none.jpg"}, "file missing"),
        ({"file_name": "x" * 5000}, "file missing"),
        ({"file_name": "gone/2.PNG"}, "file missing, but another file name differs only in case"),
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


def test_files_listed_more_than_once_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_folder(tmp_path, valid_content())
    content = valid_content()
    content["images"].append({**content["images"][0], "id": 12, "file_name": "./11.jpg"})
    config.annotations.write_text(json.dumps(content))
    assert len(CocoDataset(config).records) == 6
    assert "1 images: file listed more than once" in caplog.text
    assert "(./11.jpg)" in caplog.text


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


@pytest.mark.parametrize("prefix", ["", "gone/"])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_accented_names_are_found_in_both_unicode_forms(
    tmp_path: Path, form: Literal["NFC", "NFD"], prefix: str
) -> None:
    content = valid_content()
    config = write_folder(tmp_path, content)
    image = content["images"][0]
    path = config.images / unicodedata.normalize(form, "\u00e9t\u00e9.jpg")
    (config.images / image["file_name"]).rename(path)
    other = unicodedata.normalize("NFD" if form == "NFC" else "NFC", path.name)
    image["file_name"] = prefix + other
    config.annotations.write_text(json.dumps(content))
    dataset = CocoDataset(config, on_broken="refuse")
    assert path in {record.path for record in dataset.records}
    assert [*dataset.repairs] == ["images: file in another subfolder than listed"] * bool(prefix)

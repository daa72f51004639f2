"""Reports of a hand-made data set, compared with counts of its content."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_folder import annotation, valid_content, write_folder
from command_line import run_main
from layout_folders import WRITERS, draw_scenes
from PIL import Image

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.inspect.report import DatasetReport, inspect_splits


def inspect(**configs: DatasetConfig) -> DatasetReport:
    splits = {name: CocoDataset(config) for name, config in configs.items()}
    return inspect_splits(splits, min_size=128, max_size=160)


def write_layout(folder: Path, **contents: dict[str, Any]) -> None:
    """Write a folder with splits in the layout of `maskrcnn data inspect DIR`."""
    (folder / "annotations").mkdir(parents=True)
    for split, content in contents.items():
        (folder / split).mkdir()
        write_folder(folder / split, content)
        (folder / split / "instances.json").rename(folder / "annotations" / f"{split}.json")


def content_with_findings() -> dict[str, Any]:
    content = valid_content()
    content["categories"].append({"id": 31, "name": "[/unicorn] :car:"})
    content["annotations"] += [
        annotation(70, 5, category_id=99),
        annotation(71, 11),
        annotation(72, 11),
        annotation(73, 11, area=5, bbox=[60, 20, 30, 40]),
    ]
    return content


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in this process. Return exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: run_main(monkeypatch, capsys, "data", "inspect", *map(str, args))


def test_counts_are_those_of_the_file(tmp_path: Path) -> None:
    split = inspect(train=write_folder(tmp_path, valid_content())).splits["train"]
    assert (split.images, split.images_without_objects) == (5, 2)
    assert (split.objects, split.crowds) == (5, 2)
    assert split.orientations == {"landscape": 4, "portrait": 1, "square": 0}
    assert split.resizing == {"enlarged": 0, "reduced": 0, "unchanged": 5}
    assert split.object_sizes == {"small": 0, "medium": 5, "large": 0}
    square, thing = split.classes
    assert (square.name, square.id, square.objects, square.crowds, square.images) == (
        *("square", 7, 3, 2, 3),
    )
    assert (thing.name, thing.objects, thing.images) == ("thing", 2, 2)
    assert split.faults == {}
    assert split.suspicions == {}


def test_distributions_are_of_the_images(tmp_path: Path) -> None:
    content = {**valid_content(), "annotations": []}
    sizes = [(8 * n, 16 * n) for n in range(1, 12)]
    content["images"] = [
        {"id": n, "file_name": f"{n}.png", "height": height, "width": width}
        for n, (height, width) in enumerate(sizes)
    ]
    content["annotations"] = [annotation(n, 10, bbox=[0, 0, 20, 30]) for n in range(7)]
    config = write_folder(tmp_path, content)
    report = inspect_splits({"train": CocoDataset(config)}, min_size=40, max_size=1000)
    split = report.splits["train"]
    heights = split.distributions["height"]
    assert (heights.min, heights.p10, heights.p50, heights.p90, heights.max) == (8, 16, 48, 80, 88)
    aspects = split.distributions["aspect"]
    assert (aspects.min, aspects.max) == (2, 2)
    assert split.distributions["objects"].max == 7
    assert split.resizing == {"enlarged": 4, "reduced": 6, "unchanged": 1}


def test_images_in_two_splits_and_unlisted_ones_are_reported(tmp_path: Path) -> None:
    """Images that are listed, but invalid, are not unlisted."""
    content = valid_content()
    content["images"][0]["id"] = None
    content["images"][1]["file_name"] = "..\\val\\5.jpg"
    write_layout(tmp_path, train=valid_content(), val=valid_content())
    (tmp_path / "train" / "6.png").touch()
    (tmp_path / "annotations" / "val.json").write_text(json.dumps(content))
    configs = {
        split: DatasetConfig(
            images=tmp_path / split, annotations=tmp_path / "annotations" / f"{split}.json"
        )
        for split in ("train", "val")
    }
    report = inspect(**configs)
    assert len(report.files["file with the content of another"]) == 4
    assert report.files["file that is not listed"] == (str(tmp_path / "train" / "6.png"),)
    assert report.splits["val"].faults == {"images: no id or no file name": ("11.jpg",)}


def test_class_names_that_differ_in_case_or_blanks_are_suspicious(tmp_path: Path) -> None:
    content = valid_content()
    names = ("Thing", "Square ", "round", "cat", "catfish", "traffic light", "trafficlight")
    content["categories"] += [{"id": 50 + n, "name": name} for n, name in enumerate(names)]
    ((_, found),) = (
        inspect(train=write_folder(tmp_path, content)).splits["train"].suspicions.items()
    )
    assert found == (
        "'square' and 'Square '", "'thing' and 'Thing'", "'traffic light' and 'trafficlight'",
    )  # fmt: skip


def test_splits_that_training_rejects_are_reported(tmp_path: Path) -> None:
    """A split may lack classes. Without a training set, splits are not compared."""
    configs = {}
    for name in ("Train2017", "val2017", "test2017"):
        content = valid_content()
        if name == "Train2017":
            content["annotations"] = [annotation(1, 5, iscrowd=1)]
        elif name == "val2017":
            content["categories"][0]["name"] = "things"
            content["annotations"] = []
        else:
            content["categories"].pop(0)
            content["annotations"] = [annotation(1, 5)]
        (tmp_path / name).mkdir()
        configs[name] = write_folder(tmp_path / name, content)
    found = {name: split.suspicions for name, split in inspect(**configs).splits.items()}
    assert found["Train2017"] == {
        "no objects to train on": (str(configs["Train2017"].annotations),)
    }
    ((reason, (message,)),) = found["val2017"].items()
    assert "training rejects" in reason
    assert "is 'things', which is not a class of the model" in message
    assert found["test2017"] == {}
    del configs["Train2017"]
    assert not any(split.suspicions for split in inspect(**configs).splits.values())


def test_command_prints_and_writes_the_report(call: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_layout(folder, train=content_with_findings(), val=valid_content())
    (folder / "val" / "5.jpg").write_bytes(b"no picture")
    report, grid = tmp_path / "out" / "report.json", tmp_path / "out" / "samples.png"
    config = tmp_path / "run.yaml"
    config.write_text(
        "base: quick\ndata: {min_size: 128, max_size: 160, buckets: [[128, 160], [160, 128]], "
        "transforms: [{name: ScaleJitter}, {name: SimpleCopyPaste}]}"
    )
    output = ("--json", report, "-o", grid, "--augmented", config)
    code, printed, _ = call(folder, "--decode", *output, "--samples", 5)
    assert not code
    lines = [" ".join(line.replace("│", " ").split()) for line in printed.splitlines()]
    assert "[/unicorn] :car: 0 (0.0 %) not listed none in train, none in val" in lines
    assert "train invalid annotations: unknown category 1 70" in lines
    assert "train nearly the same box and class as another 1 72" in lines
    assert any("invalid image file 1" in line and "5.jpg" in line for line in lines)
    content = json.loads(report.read_text())
    assert content["splits"]["train"]["faults"] == {"annotations: unknown category": ["70"]}
    assert content["splits"]["train"]["suspicions"]["area does not fit the segmentation"] == ["73"]
    assert content["splits"]["val"]["suspicions"] == {}
    for path in (grid, tmp_path / "out" / "samples-augmented.png"):
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.width > 1000
            assert np.asarray(image.convert("L")).std() > 10


def test_images_to_augment_of_which_none_can_be_read_are_an_error(
    call: Any, tmp_path: Path
) -> None:
    config = write_folder(tmp_path, valid_content())
    for record in CocoDataset(config).records:
        record.path.write_bytes(b"no picture")
    words = ("--images", config.images, "--annotations", config.annotations, "--samples", 1)
    code, _, error = call(*words, "-o", tmp_path / "samples.png", "--augmented", "quick")
    assert code == 1
    assert f"{config.annotations} lists no readable image to augment; the first" in error


@pytest.mark.parametrize(
    ("changes", "text"),
    [({}, "no invalid or suspicious entries"), ({"annotations": []}, "none in instances")],
)
def test_command_accepts_images_and_annotations(
    call: Any, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    config = write_folder(tmp_path, {**valid_content(), **changes})
    code, printed, _ = call("--images", config.images, "--annotations", config.annotations)
    assert not code
    assert text in printed


def test_files_of_the_data_set_are_not_replaced(call: Any, tmp_path: Path) -> None:
    content = valid_content()
    config = write_folder(tmp_path, content)
    image = config.images / content["images"][0]["file_name"]
    image = image.rename(image.with_suffix(".png"))
    content["images"][0]["file_name"] = image.name
    config.annotations.write_text(json.dumps(content))
    link = tmp_path / "link.png"
    link.symlink_to(image)
    source = ("--images", config.images, "--annotations", config.annotations)
    unlisted = config.images / "unlisted.png"
    Image.new("RGB", (8, 8)).save(unlisted)
    outputs = ("--json", config.annotations), ("-o", image), ("-o", link), ("-o", unlisted)
    for option, path in outputs:
        before = path.read_bytes()
        code, _, error = call(*source, option, path)
        assert code == 2
        assert f"{path} is a file of the data set" in error
        assert path.read_bytes() == before
    for _ in range(2):  # an earlier report may be replaced
        report, grid = config.images / "report.json", config.images / "grid.png"
        assert not call(*source, "--json", report, "-o", grid)[0]


def test_only_annotations_of_labelme_are_not_replaced(call: Any, tmp_path: Path) -> None:
    """They are in a folder, which may also hold earlier drawings."""
    WRITERS["LabelMe"](tmp_path, draw_scenes(2), [])
    for _ in range(2):
        assert not call(tmp_path, "-o", tmp_path / "grid.png")[0]
    file = next(tmp_path.rglob("*.json"))
    code, _, error = call(tmp_path, "--json", file)
    assert code == 2
    assert f"{file} is a file of the data set" in error


def test_invalid_arguments_and_data_sets_are_errors(call: Any, tmp_path: Path) -> None:
    for args in ((), ("--images", tmp_path), (tmp_path, "--images", tmp_path)):
        code, _, error = call(*args)
        assert code == 2
        assert "give either DIR, or both --images and --annotations" in error
    assert "is below --min-size 1400" in call(tmp_path, "--min-size", 1400)[2]
    assert "-o FILE" in call(tmp_path, "--augmented", "quick")[2]
    assert "give a name that ends with .png" in call(tmp_path, "-o", tmp_path / "samples.jpg")[2]
    code, _, error = call(tmp_path)
    assert code == 1
    assert f"{tmp_path} has none of the known layouts" in error
    write_layout(tmp_path, train=valid_content())
    (tmp_path / "annotations" / "train.json").write_text("{")
    code, _, error = call(tmp_path)
    assert code == 1
    assert "train.json is not JSON" in error

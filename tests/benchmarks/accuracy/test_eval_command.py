"""`maskrcnn eval` of a bundle; `test_validation.py` tests that of a checkpoint."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import invoke

from maskrcnn_trt.benchmarks.accuracy import evaluate
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.weights import bundle_cache
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.data.synthetic.dataset import SyntheticConfig, draw_dataset
from maskrcnn_trt.training.evaluation.validation import ExpectationError

# Overrides for the evaluation of the tiny checkpoint.
KEYS = (
    "data.workers=0", "precision=fp32", "data.min_size=96", "data.max_size=160",
    "data.buckets=[[96,160],[160,96]]",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of the tiny model's classes, and a configuration that names it."""
    folder = tmp_path_factory.mktemp("data")
    names = ("circle", "square", "ring")
    draw_dataset(folder, SyntheticConfig(train=1, val=3, width=160, height=96, classes=names))
    categories = [c.model_dump() for c in load_checkpoint(tiny_checkpoint).categories]
    for path in (folder / "annotations").iterdir():
        content = json.loads(path.read_text())
        ids = {
            old["id"]: new["id"] for old, new in zip(content["categories"], categories, strict=True)
        }
        for annotation in content["annotations"]:
            annotation["category_id"] = ids[annotation["category_id"]]
        path.write_text(json.dumps({**content, "categories": categories}))
    sets = {
        split: {"images": f"{folder}/{split}", "annotations": f"{folder}/annotations/{split}.json"}
        for split in ("train", "val")
    }
    (folder / "config.yaml").write_text(json.dumps({"data": sets}))
    return folder


_evaluate = partial(invoke, evaluate)


def test_all_ways_to_name_the_data_give_the_same_metrics(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    images, annotations = folder / "val", folder / "annotations" / "val.json"
    roboflow = tmp_path / "roboflow"
    for name, split in (("train", "train"), ("valid", "val")):
        shutil.copytree(folder / split, roboflow / name)
        shutil.copy(
            folder / "annotations" / f"{split}.json", roboflow / name / "_annotations.coco.json"
        )
    ways: tuple[tuple[object, ...], ...] = (
        (folder, "--batch", 2),
        (roboflow, "--batch", 2),
        (folder / "config.yaml", "evaluation.images_per_batch=2"),
        ("--images", images, "--annotations", annotations, "--batch", 2, "--backend", "onnxruntime",
         "--precision", "fp32", "--evaluator", "pycocotools"),
    )  # fmt: skip
    reports = []
    for number, way in enumerate(ways):
        path = tmp_path / f"{number}.json"
        answer = _evaluate(bundle, *way, "--json", path)
        assert answer.exit_code == 0, answer.exception
        assert answer.stdout.count("maxDets=100") == 20
        assert "3 images in " in answer.stdout
        assert " images/s in fp32 with onnxruntime on cpu, in batches of up to 2" in answer.stdout
        reports.append(json.loads(path.read_text()))
    for report in reports:
        assert report["metrics"] == pytest.approx(reports[0]["metrics"], abs=1e-12)
        assert (report["images"], report["left_out"], report["max_batch"]) == (3, 0, 2)
        assert report["images_per_second"] == pytest.approx(3 / report["seconds"])


def test_missing_objects_are_the_reason_of_negative_metrics(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    annotations = folder / "annotations" / "val.json"
    content = json.loads(annotations.read_text())
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({**content, "annotations": []}))
    for path, is_named in ((empty, True), (annotations, False)):
        answer = _evaluate(bundle, "--images", folder / "val", "--annotations", path)
        assert answer.exit_code == 0, answer.exception
        assert ("no annotated objects" in answer.stderr) == is_named


def test_result_files_are_written_to_the_output_folder(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    config, output = folder / "config.yaml", tmp_path / "files"
    report = output / "new" / "report.html"
    expected = "evaluation.expected={segm/AP: 1}"
    args = (bundle, config, expected, "-o", output, "--report", report)
    missed = _evaluate(*args)
    assert isinstance(missed.exception, ExpectationError)
    assert f"{output}\n" in missed.stdout
    assert f"{report}\n" in missed.stdout
    assert "<td>disc</td>" in report.read_text()
    measured = torch.load(output / "coco_results.pth", weights_only=True)
    assert measured["segm"].keys() >= {"AP", "AR100", "AP/disc", "AP/box", "AP/ring"}
    for name in ("bbox.json", "segm.json"):
        assert {r["image_id"] for r in json.loads((output / name).read_text())} == {1, 2, 3}


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ((), "both --images and --annotations"),
        (("--images", "."), "both --images and --annotations"),
        (
            ("{folder}", "--images", ".", "--annotations", "{folder}/config.yaml"),
            "both --images and --annotations",
        ),
        (("{folder}", "seed=1"), "seed=1 needs a configuration"),
        (("1x", "model.roi.nms_iou=0.4"), "model.roi.nms_iou does not apply to a bundle"),
        (("quick", "data.val=null"), "set data.val.images"),
        (("no-such",), "no-such is neither"),
        (("{bundle}",), "is a model, not a data set"),
        (("model_final.pth",), "is a model, not a data set"),
        (("{folder}/annotations/val.json",), "give --images FOLDER --annotations"),
        (("{folder}", "--report", "model_final.pth"), "does not end in .html"),
        (("{folder}", "--batch", "100000"), "--batch"),
        (("{folder}", "--json", "image.jpg"), "does not end in .json"),
        (("{folder}", "--json", "{folder}/annotations/val.json"), "is an annotation file"),
        (("{folder}", "--precision", "tf32"), "no tf32 onnx artifact"),
        (("{folder}", "--precision", "bf16"), "ONNX Runtime does not compute in bf16"),
    ],
)
def test_arguments_that_a_bundle_does_not_have(
    bundle: Path, folder: Path, words: tuple[str, ...], fact: str
) -> None:
    answer = _evaluate(bundle, *(word.format(folder=folder, bundle=bundle) for word in words))
    assert answer.exit_code != 0
    assert fact in answer.output + str(answer.exception)


def test_classes_are_checked_before_an_export(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bundle_cache, "_export", lambda *_: pytest.fail("exported"))
    draw_dataset(tmp_path / "data", SyntheticConfig(train=1, val=1, classes=("star",)))
    answer = _evaluate(tiny_checkpoint, tmp_path / "data")
    assert isinstance(answer.exception, ConfigError)
    assert "'star', which is not a class of the model" in str(answer.exception)


def test_a_checkpoint_needs_data(tiny_checkpoint: Path) -> None:
    answer = _evaluate(tiny_checkpoint)
    assert answer.exit_code == 2
    assert "give CONFIG" in answer.output


def test_options_set_keys_of_the_evaluation(
    tiny_checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    keys = (*KEYS, f"output_dir={tmp_path}")
    path = tmp_path / "report.html"
    words = (
        "--evaluator", "pycocotools", "--batch", 1, "--json", tmp_path / "m.json", "--report", path,
    )  # fmt: skip
    answer = _evaluate(tiny_checkpoint, folder / "config.yaml", *keys, *words)
    assert answer.exit_code == 0, answer.exception
    measured = torch.load(tmp_path / "inference" / "coco_results.pth", weights_only=True)
    report = json.loads((tmp_path / "m.json").read_text())
    assert report["checkpoint"] == str(tiny_checkpoint)
    assert report["metrics"]["segm/AP50"] == measured["segm"]["AP50"]
    assert f"<td>{measured['segm']['AP50']:.3f}</td>" in path.read_text()


def test_the_chosen_evaluator_computes(
    tiny_checkpoint: Path, bundle: Path, folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "pycocotools.cocoeval", None)  # as if it were not installed
    keys = (*KEYS, f"output_dir={tmp_path}")
    config, chosen = folder / "config.yaml", "evaluation.evaluator=pycocotools"
    for args in (
        (tiny_checkpoint, config, *keys, chosen),
        (bundle, config, chosen),
        (bundle, folder, "--evaluator", "pycocotools"),
    ):
        error = _evaluate(*args).exception
        assert isinstance(error, ModuleNotFoundError)
        assert error.name == "pycocotools.cocoeval"

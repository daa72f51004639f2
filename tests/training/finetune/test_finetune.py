"""Fine-tuning of the tiny model on data in foreign layouts."""

import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from layout_folders import NAMES, WRITERS, draw_scenes, write_json
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.commands import train
from maskrcnn_trt.training.config import ConfigError, load_config
from maskrcnn_trt.training.data.coco.dataset import DataError
from maskrcnn_trt.training.finetune.overrides import resumed_config

SCENES = draw_scenes(24)
FAST = ("solver.max_iterations=3", "solver.images_per_batch=2", "data.workers=0", "device=cpu")


class Run(NamedTuple):
    folder: Path
    output: str


def call(data: Path, output: Path, *args: str) -> str:
    """Run `maskrcnn train finetune` in this process. Return its output."""
    arguments = ["finetune", str(data), f"output_dir={output}", *args]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(train, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Run:
    """Fine-tuning on a folder of LabelMe, of which a part is held out."""
    folder = tmp_path_factory.mktemp("finetune")
    WRITERS["LabelMe"](folder / "parts", SCENES, [])
    (folder / "parts" / "photo_003.json").write_text("{")
    output = call(folder / "parts", folder / "run", f"weights={tiny_checkpoint}", *FAST)
    return Run(folder / "run", output)


def test_data_weights_and_plan_are_described(run: Run, tiny_checkpoint: Path) -> None:
    assert "LabelMe" in run.output
    assert "photo_003.json" in run.output
    assert ", ".join(sorted(NAMES)) in run.output
    held_out = json.loads((run.folder / "data" / "val.json").read_text())["images"]
    assert f"{len(held_out)} of 23 images are held out" in run.output
    for layer in ("cls_score", "bbox_pred", "mask_fcn_logits"):
        assert re.search(rf"weights have 3 classes.*{layer}", run.output)
    rows = dict(re.findall(r"│ ([\w.]+) +│ (.*?) +│", run.output))
    assert rows["solver.max_iterations"] == "3"
    assert rows["weights"] == str(tiny_checkpoint)
    saved = load_config(str(run.folder / "config.yaml"))
    assert rows["solver.base_lr"] == str(saved.solver.base_lr)
    assert rows["data.min_size"] == str(saved.data.min_size) == "96"


def test_only_the_predictors_are_new(run: Run, tiny_checkpoint: Path) -> None:
    start, end = load_checkpoint(tiny_checkpoint), load_checkpoint(run.folder / "model_final.pth")
    assert [category.name for category in end.categories] == sorted(NAMES)
    others = {n for n, w in end.weights.items() if w.shape != start.weights[n].shape}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in others} == {
        *("cls_score", "bbox_pred", "mask_fcn_logits")
    }
    for name in end.weights.keys() - others:
        if "running" not in name and "num_batches" not in name:
            # AdamW moves a weight by at most the learning rate per step.
            assert (end.weights[name] - start.weights[name]).abs().max() < 1e-3, name


def test_metrics_are_those_of_pycocotools_on_the_images_held_out(run: Run) -> None:
    with redirect_stdout(io.StringIO()):
        truth = COCO(run.folder / "data" / "val.json")
        truth.dataset["info"] = {}
        detections = truth.loadRes(str(run.folder / "inference" / "bbox.json"))
        evaluation = COCOeval(truth, detections, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    metrics = load_checkpoint(run.folder / "model_final.pth").metrics
    assert metrics["bbox/AP"] == pytest.approx(evaluation.stats[0], abs=1e-6)
    assert f"box: AP {evaluation.stats[0]:.3f}" in run.output


def test_curves_worst_images_and_the_next_commands_are_named(run: Run) -> None:
    for name in ("curves.png", "worst.png"):
        with Image.open(run.folder / name) as image:
            assert image.format == "PNG"
        assert str(run.folder / name) in run.output
    commands = [shlex.split(line) for line in run.output.splitlines() if "  maskrcnn " in line]
    assert [command[1] for command in commands] == ["export", "predict", "serve"]
    assert Path(commands[0][2]).is_file()


def test_a_run_is_not_overwritten_but_can_be_resumed(run: Run, tiny_checkpoint: Path) -> None:
    data = run.folder.parent / "parts"
    with pytest.raises(ConfigError, match="--resume"):
        call(data, run.folder, f"weights={tiny_checkpoint}")
    before = (run.folder / "config.yaml").read_text()
    assert "final checkpoint" in call(data, run.folder, "--resume")
    assert (run.folder / "config.yaml").read_text() == before
    with pytest.raises(SystemExit, match="2"):
        call(data, run.folder, "--resume", "--dry-run")
    WRITERS["YOLO"](run.folder.parent / "others", SCENES, [])
    with pytest.raises(ConfigError, match=r"others.*output_dir"):
        call(run.folder.parent / "others", run.folder, "--resume")


@pytest.mark.parametrize("layout", ["LabelMe", "COCO"])
def test_a_run_is_resumed_on_moved_data(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The paths of the run are relative to the working directory, which changes too."""
    WRITERS[layout](tmp_path / "data", SCENES[:6], draw_scenes(2, seed=3))
    monkeypatch.chdir(tmp_path)
    call(Path("data"), Path("run"), f"weights={tiny_checkpoint}", *FAST)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = ("--resume", "solver.max_iterations=4", "solver.steps=[]")
    call(Path("moved"), Path("../run"), *settings)
    assert load_checkpoint(tmp_path / "run" / "model_final.pth").iteration == 4
    assert load_config(str(tmp_path / "run" / "config.yaml")).data.train.images.is_dir()


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, (2,)),
        ({"solver.max_iterations": 300}, (200,)),
        ({"solver.max_iterations": 300, "solver.steps": [9]}, (9,)),
    ],
)
def test_steps_are_scaled_to_the_new_length_of_a_resumed_run(
    run: Run, given: dict[str, Any], steps: tuple[int, ...]
) -> None:
    overrides = [f"{key}={value}" for key, value in given.items()]
    assert resumed_config(run.folder, overrides, given).solver.steps == steps


def test_a_run_is_not_resumed_with_other_annotations(tmp_path: Path, tiny_checkpoint: Path) -> None:
    WRITERS["LabelMe"](tmp_path / "data", SCENES[:6], [])
    call(tmp_path / "data", tmp_path / "run", f"weights={tiny_checkpoint}", *FAST)
    WRITERS["LabelMe"](tmp_path / "data", SCENES[:7], [])
    with pytest.raises(ConfigError, match=r"annotations of .*data have changed.* weights=FILE"):
        call(tmp_path / "data", tmp_path / "run", "--resume")


@pytest.mark.parametrize(
    ("layout", "file"),
    [("COCO", "data/instances_train2017.json"), ("LabelMe", "data/train.json")],
)
def test_annotations_are_not_written_into_the_data_set(
    tmp_path: Path, tiny_checkpoint: Path, layout: str, file: str
) -> None:
    WRITERS[layout](tmp_path / "run", SCENES[:6], [])
    old = next((tmp_path / "run").rglob("*.json"))
    (tmp_path / "run" / "data").mkdir()
    old.rename(tmp_path / "run" / file)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    data = tmp_path / "run" / ("data" if layout == "COCO" else "")
    if layout == "COCO":
        (tmp_path / "run" / "train2017").rename(data / "train2017")
    with pytest.raises(ConfigError, match=r"run/data, where the run writes .*output_dir=FOLDER"):
        call(data, tmp_path / "run", f"weights={tiny_checkpoint}", "--dry-run")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_annotations_of_a_running_training_are_not_replaced(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    WRITERS["LabelMe"](tmp_path / "data", SCENES[:6], [])
    file = tmp_path / "run" / "data" / "train.json"
    write_json(file, {})
    arguments = (tmp_path / "data", tmp_path / "run", f"weights={tiny_checkpoint}")
    program = (
        "import sys; from pathlib import Path\n"
        "from maskrcnn_trt.training.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked():\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} .*is training in"):
            call(*arguments)
        process.kill()
    with pytest.raises(ConfigError, match=r"train\.json exists, .*output_dir=FOLDER"):
        call(*arguments)  # no run has written the file
    assert file.read_text() == "{}"


@pytest.mark.parametrize("name", WRITERS)
def test_each_layout_is_recognised(tmp_path: Path, tiny_checkpoint: Path, name: str) -> None:
    WRITERS[name](tmp_path / "data", SCENES[:20], draw_scenes(4, seed=3))
    output = call(tmp_path / "data", tmp_path / "run", f"weights={tiny_checkpoint}", "--dry-run")
    assert not (tmp_path / "run" / "data").exists()
    assert name in output
    assert f"{len(NAMES)} classes" in output
    assert not (tmp_path / "run" / "model_final.pth").exists()


def test_images_of_another_size_than_annotated_are_named(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    WRITERS["COCO"](tmp_path / "data", SCENES[:4], SCENES[:2])
    images = sorted((tmp_path / "data" / "train2017").iterdir())
    arguments = (tmp_path / "data", tmp_path / "run", f"weights={tiny_checkpoint}", "--dry-run")
    Image.new("RGB", (90, 50)).save(images[0])
    output = call(*arguments)
    assert f"{images[0]}: 50x90 pixels" in output
    assert "3 training images" in output
    assert "left out of validation" not in output
    others = sorted((tmp_path / "data" / "val2017").iterdir())
    Image.new("RGB", (90, 50)).save(others[0])
    assert f"left out of validation: 1 image files ({others[0]}: 50x90 pixels" in call(*arguments)
    for folder in (others, images):
        for image in folder:
            Image.new("RGB", (90, 50)).save(image)
        with pytest.raises(DataError, match=r"usable image.*50x90 pixels"):
            call(*arguments)


def test_invalid_entries_of_coco_files_are_left_out_of_the_plan(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    WRITERS["COCO"](tmp_path / "data", SCENES[:5], SCENES[5:8])
    arguments = (tmp_path / "data", tmp_path / "run", f"weights={tiny_checkpoint}", "--dry-run")
    output = call(*arguments)
    assert "5 training images;" in output
    assert "left out" not in output
    for reason, *settings in (
        ("fp16 needs a GPU", "device=cpu", "precision=fp16"),
        (f"num_classes is 9, but .* has {len(NAMES)} categories", "model.num_classes=9"),
        ("no category 'foo'", "evaluation={expected: {bbox/AP/foo: 0.1}}"),
        ("data.train.images cannot be set", "data.train.images=images"),
        (r"data\.val cannot be set.*skip_test", "data.val=null"),
    ):
        with pytest.raises(ConfigError, match=reason):
            call(*arguments, *settings)
    (tmp_path / "data" / "train2017" / SCENES[0].name).unlink()
    file = tmp_path / "data" / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    broken = [a["id"] for a in content["annotations"] if a["image_id"] == 2]
    for annotation in content["annotations"]:
        if annotation["id"] in broken:
            annotation["segmentation"] = [[1, 2]]
    content["categories"].append({"id": 90, "name": f" {NAMES[0].upper()}"})
    file.write_text(json.dumps(content))
    (tmp_path / "data" / "val2017" / SCENES[5].name).unlink()
    output = call(*arguments)
    assert f"case or blanks: '{NAMES[0]}' and ' {NAMES[0].upper()}'" in output
    assert re.search(r"3 training images; .*left out: 1 .*data\.keep_empty=true", output)
    assert "4 training images, 1 of them without objects;" in call(
        *arguments, "data.keep_empty=true"
    )
    assert re.search(rf"training: 1 images: file missing \({SCENES[0].name}\)", output)
    assert re.search(rf"training:.*\({', '.join(map(str, broken))}\)", output)
    assert re.search(rf"validation: 1 images: file missing \({SCENES[5].name}\)", output)


def test_mistyped_keys_and_unknown_folders_are_errors(tmp_path: Path) -> None:
    for override in ("solver.max_iteration=3", "solver.max_iterations=many", "output", "device=x"):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            # This `max_size` contradicts only the default of `min_size`, which will be fitted.
            call(tmp_path, tmp_path / "run", "data.max_size=100", override)
    with pytest.raises(DataError, match="none of the known layouts"):
        call(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_reasons_are_named_if_no_image_can_be_used(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Names differ in their case, or all labels are boxes."""
    WRITERS["COCO"](tmp_path / "coco", SCENES[:4], [])
    for image in (tmp_path / "coco" / "train2017").iterdir():
        image.rename(image.with_suffix(".JPG"))
    WRITERS["YOLO"](tmp_path / "yolo", SCENES[:4], [])
    for labels in (tmp_path / "yolo").rglob("photo*.txt"):
        labels.write_text("0 .5 .5 .2 .2\n")
    for name, reason in (("coco", "file missing"), ("yolo", "box without an outline")):
        with pytest.raises(DataError, match=rf"{name}: .*{reason}.*data inspect"):
            call(tmp_path / name, tmp_path / "run", f"weights={tiny_checkpoint}", "--dry-run")
